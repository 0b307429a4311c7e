#include "distributed/shm/host.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "distributed/comm_trace.h"

namespace fsdp::detail::shm {
namespace {

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

/// Equal on two processes iff a process id means the same to both: one boot of one kernel, one namespace of processes.
/// (Users may differ; then opening fails.)
std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  std::array<char, 64> space{};
  if (boot.empty() || readlink("/proc/self/ns/pid", space.data(), space.size() - 1) < 0)
    return fmt::format("unknown {}", getpid());  // equal to nobody's
  return fmt::format("{} {}", boot, space.data());
}

// What a rank answers: nothing when it has the segment mapped, else where the problem lies.
constexpr const char* kOtherHost = "host ";
constexpr const char* kNoMemory = "memory ";

/// "" or the problem.
std::string open_segment(const CommSetup& setup, c10d::Store& store, std::shared_ptr<Segment>& segment) {
  if (setup.rank == 0) {
    try {
      segment = Segment::create(setup.size);
    } catch (const std::exception& e) {
      const auto problem = fmt::format("{}rank {}: {}", kNoMemory, setup.ranks[0], e.what());
      store.set("address", bytes_of(problem));
      return problem;
    }
    store.set("host", bytes_of(host_identity()));
    store.set("address", bytes_of(segment->address()));
    return "";
  }
  auto missing = wait_for_keys(store, {"address"}, setup.timeout, *setup.trace->failures());
  if (!missing.empty())
    throw CommError(fmt::format("rank {} did not offer shared memory within {} ms (does it use another backend?)",
                                setup.ranks[0], setup.timeout.count()));
  const auto address = store.get_to_str("address");
  if (address.starts_with(kNoMemory)) return address;
  if (store.get_to_str("host") != host_identity())
    return fmt::format("{}rank {} does not run on the host of rank {} (or in another container)", kOtherHost,
                       setup.ranks[setup.rank], setup.ranks[0]);
  try {
    segment = Segment::open(address, setup.size);
  } catch (const std::exception& e) {
    return fmt::format("{}rank {}: {}", kNoMemory, setup.ranks[setup.rank], e.what());
  }
  return "";
}

}  // namespace

Joined join(const CommSetup& setup) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>("shm", setup.store);
  Joined joined;
  const auto mine = open_segment(setup, *store, joined.segment);
  if (joined.segment) {
    auto& state = joined.segment->state(setup.rank);
    state.pid = getpid();
    state.start_time = process_start_time(getpid());
    CPU_ZERO(&state.cores);
    sched_getaffinity(0, sizeof(state.cores), &state.cores);
  }
  const auto key = [](int64_t r) { return fmt::format("joined/{}", r); };
  std::vector<std::string> keys;
  for (int64_t r = 0; r < setup.size; ++r) keys.push_back(key(r));
  store->set(key(setup.rank), bytes_of("." + mine));  // some stores do not take empty values
  auto missing = wait_for_keys(*store, keys, setup.timeout, *setup.trace->failures());
  for (auto& r : missing) r = setup.ranks[r];
  if (!missing.empty())
    throw CommError(fmt::format("no answer from ranks {} within {} ms (do they use another backend?)",
                                fmt::join(missing, ", "), setup.timeout.count()));
  for (int64_t r = 0; r < setup.size && joined.problem.empty(); ++r) {
    const auto answer = store->get_to_str(key(r)).substr(1);
    if (answer.empty()) continue;
    joined.one_host = !answer.starts_with(kOtherHost);
    joined.problem = answer.substr(answer.find(' ') + 1);
  }
  if (!joined.problem.empty())
    joined.segment.reset();
  else if (setup.rank == 0)
    joined.segment->close_descriptor();
  return joined;
}

int64_t cores_of(const Segment& segment) {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int64_t r = 0; r < segment.ranks(); ++r) CPU_OR(&all, &all, &segment.state(r).cores);
  return CPU_COUNT(&all);
}

}  // namespace fsdp::detail::shm
