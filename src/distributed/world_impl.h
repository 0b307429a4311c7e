#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include <fsdp/distributed/world.h>

#include "distributed/comm_trace.h"

namespace fsdp {

struct World::Impl {
  int64_t rank = 0, size = 1, local_rank = 0;
  WorldOptions options;
  std::string backend;
  c10::Device device{c10::kCPU};
  c10::intrusive_ptr<c10d::Store> store;
  bool single_host = true;
  std::shared_ptr<detail::CommTrace> trace = std::make_shared<detail::CommTrace>();
  /// Ranks as threads: communicators outlive the rank that used them, so that its end (or exception) does not look like
  /// a lost peer to the others.
  bool keep_communicators = false;

  std::mutex mutex;  // guards the list below: abort() comes from other threads
  std::vector<std::weak_ptr<Communicator>> communicators;
  std::vector<std::shared_ptr<Communicator>> kept;
  std::atomic<bool> aborted = false;
  int64_t meshes = 0, barriers = 0;
};

namespace detail {
/// The device and backend that the options ask for. ValueError if they do not fit this build or each other.
void settle_options(World::Impl& impl, WorldOptions options);
}  // namespace detail

}  // namespace fsdp
