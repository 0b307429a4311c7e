#include "distributed/backend.h"

#include <cstdlib>

#include <fmt/format.h>

namespace fsdp::detail {

std::string resolve_backend(const std::string& name, c10::Device device) {
  std::string wanted = name;
  if (wanted == "auto")
    if (const char* chosen = std::getenv("FSDP_BACKEND"); chosen && *chosen) wanted = chosen;
  if (wanted == "auto") return device.is_cuda() ? "nccl" : "gloo";
  if (wanted == "gloo" || wanted == "nccl" || wanted == "fake") return wanted;
  if (wanted == "shm") throw ValueError("backend 'shm' is not available in this version: use 'gloo' or 'auto'");
  throw ValueError(fmt::format("unknown backend '{}': expected auto, gloo, shm, nccl or fake", wanted));
}

std::shared_ptr<Communicator> make_communicator(const std::string& backend, CommSetup setup) {
  // One rank communicates with nobody, over any transport.
  if (setup.size == 1 || backend == "fake") return make_fake_communicator(std::move(setup));
  if (backend == "nccl") return make_nccl_communicator(std::move(setup));
  return make_gloo_communicator(std::move(setup));
}

}  // namespace fsdp::detail
