#include "distributed/backend.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "distributed/comm_trace.h"

namespace fsdp::detail {
namespace {

std::shared_ptr<Communicator> connect(const std::string& backend, CommSetup setup) {
  // One rank communicates with nobody, over any transport.
  if (setup.size == 1 || backend == "fake") return make_fake_communicator(std::move(setup));
  if (backend == "nccl") return make_nccl_communicator(std::move(setup));
  if (backend == "shm") return make_shm_communicator(setup, /*required=*/true);
  if (backend == "auto")
    if (auto comm = make_shm_communicator(setup, /*required=*/false)) return comm;
  return make_gloo_communicator(std::move(setup));
}

}  // namespace

std::string resolve_backend(const std::string& name, c10::Device device) {
  std::string wanted = name;
  if (wanted == "auto")
    if (const char* chosen = std::getenv("FSDP_BACKEND"); chosen && *chosen) wanted = chosen;
  if (wanted == "auto") return device.is_cuda() ? "nccl" : "auto";  // on CPU each communicator looks for itself
  if (wanted == "gloo" || wanted == "shm" || wanted == "nccl" || wanted == "fake") return wanted;
  throw ValueError(fmt::format("unknown backend '{}': expected auto, gloo, shm, nccl or fake", wanted));
}

std::shared_ptr<Communicator> make_communicator(const std::string& backend, CommSetup setup) {
  const auto failures = setup.trace->failures();
  auto ranks = setup.ranks;
  auto comm = connect(backend, std::move(setup));
  comm->set_world_ranks(std::move(ranks));
  failures->add(comm);
  return comm;
}

CommSetup split_setup(const CommSetup& parent, int64_t number, int64_t color, int64_t key, std::string axes) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("split/{}", number), parent.store);
  const auto mine = fmt::format("{} {}", color, key);
  store->set(std::to_string(parent.rank), std::vector<uint8_t>(mine.begin(), mine.end()));
  std::vector<std::string> keys;
  for (int64_t r = 0; r < parent.size; ++r) keys.push_back(std::to_string(r));
  wait_for_ranks(*store, keys, parent.ranks, parent.timeout, *parent.trace->failures());
  std::vector<std::pair<int64_t, int64_t>> members;  // key, rank of the parent
  for (int64_t r = 0; r < parent.size; ++r) {
    const auto text = store->get_to_str(keys[static_cast<size_t>(r)]);
    size_t used = 0;
    if (std::stoll(text, &used) == color) members.emplace_back(std::stoll(text.substr(used)), r);
  }
  std::sort(members.begin(), members.end());
  CommSetup setup = parent;
  setup.store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("color/{}", color), store);
  setup.axes = std::move(axes);
  setup.size = static_cast<int64_t>(members.size());
  setup.ranks.clear();
  for (const auto& [k, r] : members) {
    if (r == parent.rank) setup.rank = static_cast<int64_t>(setup.ranks.size());
    setup.ranks.push_back(parent.ranks[static_cast<size_t>(r)]);
  }
  return setup;
}

}  // namespace fsdp::detail
