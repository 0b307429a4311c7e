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
  bool single_host = true;     // all ranks of the world share this host
  std::vector<int64_t> ranks;  // the members' ranks in the world
  int64_t host_ranks = 0;      // of the job on this host, at most; 0: unknown
};

/// ValueError for a name that is none of auto, gloo, shm, nccl, fake, or not in this build.
std::string resolve_backend(const std::string& name, c10::Device device);
/// The one way to make a communicator, at first and when one is split: it also registers it with the world's failures.
std::shared_ptr<Communicator> make_communicator(const std::string& backend, CommSetup setup);
/// For do_split: exchanges the ranks' colors through the parent's store and returns the setup of this rank's part.
/// `number`: of the parent's split, from 0. CommError when ranks are missing at the timeout, naming them.
CommSetup split_setup(const CommSetup& parent, int64_t number, int64_t color, int64_t key, std::string axes);

std::shared_ptr<Communicator> make_gloo_communicator(CommSetup setup);
/// Null, on all ranks alike, when the ranks do not share a host or its memory has no room; if `required` ValueError or
/// CommError instead.
std::shared_ptr<Communicator> make_shm_communicator(const CommSetup& setup, bool required);
std::shared_ptr<Communicator> make_fake_communicator(CommSetup setup);
/// Throws ValueError in a build without CUDA.
std::shared_ptr<Communicator> make_nccl_communicator(CommSetup setup);

}  // namespace fsdp::detail
