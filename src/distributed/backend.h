#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <fsdp/distributed/communicator.h>

namespace fsdp::detail {

/// What a transport needs to connect one communicator.
struct CommSetup {
  c10::intrusive_ptr<c10d::Store> store;  // private to this communicator
  int64_t rank, size;
  c10::Device device;
  std::string axes;
  std::chrono::milliseconds timeout;
  std::shared_ptr<CommTrace> trace;
  bool single_host = true;  // all ranks of the world share this host
};

/// ValueError for a name that is none of auto, gloo, shm, nccl, fake, or not in this build.
std::string resolve_backend(const std::string& name, c10::Device device);
std::shared_ptr<Communicator> make_communicator(const std::string& backend, CommSetup setup);

std::shared_ptr<Communicator> make_gloo_communicator(CommSetup setup);
std::shared_ptr<Communicator> make_fake_communicator(CommSetup setup);
/// Throws ValueError in a build without CUDA.
std::shared_ptr<Communicator> make_nccl_communicator(CommSetup setup);

}  // namespace fsdp::detail
