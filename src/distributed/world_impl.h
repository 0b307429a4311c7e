#pragma once

#include <cstdint>
#include <memory>
#include <string>

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
  bool simulated = false;                    // the other ranks do not exist
  std::shared_ptr<detail::CommTrace> trace;  // made by World
  std::shared_ptr<Communicator> control;     // none before its first use
  int64_t meshes = 0, barriers = 0;
};

namespace detail {
/// The device and backend that the options ask for. ValueError if they do not fit this build or each other.
void settle_options(World::Impl& impl, WorldOptions options);
}  // namespace detail

}  // namespace fsdp
