#include <fsdp/distributed/world.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <numeric>

#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "distributed/backend.h"
#include "distributed/environment.h"
#include "distributed/world_impl.h"

namespace fsdp {

World::World(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
World::~World() {
  impl_->control.reset();  // reports to the failures while it lives
  impl_->trace->failures()->stop();
}

int64_t World::rank() const { return impl_->rank; }
int64_t World::size() const { return impl_->size; }
int64_t World::local_rank() const { return impl_->local_rank; }
c10::Device World::device() const { return impl_->device; }
const WorldOptions& World::options() const { return impl_->options; }
const c10::intrusive_ptr<c10d::Store>& World::store() const { return impl_->store; }
const std::shared_ptr<detail::CommTrace>& World::trace() const { return impl_->trace; }
int64_t World::next_mesh_id() { return impl_->meshes++; }

namespace {

/// Returns when all ranks have come here; `operation` is what errors call it.
void meet(World::Impl& world, const char* operation, std::chrono::milliseconds limit) {
  const auto number = world.barriers++;
  auto& failures = *world.trace->failures();
  const auto key = [](int64_t n, const char* event, int64_t r) {
    return fmt::format("fsdp/barrier/{}/{}/{}", n, event, r);
  };
  const auto wait_for_all = [&](const char* event, std::chrono::milliseconds time) {
    std::vector<std::string> keys;
    for (int64_t r = 0; r < world.size; ++r) keys.push_back(key(number, event, r));
    return detail::wait_for_keys(*world.store, keys, time, failures);
  };
  const std::vector<uint8_t> set{1};
  try {
    if (const auto why = failures.ended(); !why.empty()) throw CommError(why);
    world.store->set(key(number, "arrived", world.rank), set);
    if (const auto missing = wait_for_all("arrived", limit); !missing.empty())
      throw CommError(fmt::format("timed out after {} ms; missing ranks: {}", limit.count(), fmt::join(missing, ", ")));
    // Whoever is here has left the barrier before this one, so nobody looks for its keys any more.
    if (number > 0)
      for (const char* event : {"arrived", "left"}) world.store->deleteKey(key(number - 1, event, world.rank));
    // Rank 0's process may serve the store and end right after this: it leaves last, or the others lose the store while
    // they still look. A rank that dies between the two is no failure of this barrier, so the wait is short.
    world.store->set(key(number, "left", world.rank), set);
    constexpr std::chrono::milliseconds kGrace(10'000);
    if (world.rank == 0) wait_for_all("left", std::min(kGrace, limit));
  } catch (const std::exception& e) {
    detail::raise_failure(failures, fmt::format("rank {}: {} failed: {}", world.rank, operation, detail::text_of(e)));
  }
}

}  // namespace

void World::barrier() {
  if (impl_->size > 1 && !impl_->simulated) meet(*impl_, "barrier", impl_->options.timeout);
}

std::shared_ptr<Communicator> World::communicator(std::span<const int64_t> ranks, const std::string& key,
                                                  const std::string& axes) {
  const auto me = std::find(ranks.begin(), ranks.end(), impl_->rank);
  if (me == ranks.end())
    throw ValueError(
        fmt::format("rank {} is not one of the communicator's ranks {}", impl_->rank, fmt::join(ranks, ", ")));
  auto& failures = *impl_->trace->failures();
  const auto timeout = impl_->options.timeout;
  detail::CommSetup setup{c10::make_intrusive<c10d::PrefixStore>("fsdp/comm/" + key, impl_->store),
                          me - ranks.begin(),
                          static_cast<int64_t>(ranks.size()),
                          impl_->device,
                          axes,
                          timeout,
                          impl_->trace,
                          impl_->single_host,
                          {ranks.begin(), ranks.end()},
                          impl_->size};
  try {
    if (const auto why = failures.ended(); !why.empty()) throw CommError(why);
    if (ranks.size() > 1 && impl_->backend != "fake") {
      // The members meet before the transport connects them: its own errors would not say who is missing.
      std::vector<std::string> keys;
      for (auto r : ranks) keys.push_back(fmt::format("here/{}", r));
      setup.store->set(fmt::format("here/{}", impl_->rank), std::vector<uint8_t>{1});
      detail::wait_for_ranks(*setup.store, keys, ranks, timeout, failures);
    }
    return detail::make_communicator(impl_->backend, std::move(setup));
  } catch (const ValueError&) {
    throw;
  } catch (const std::exception& e) {
    detail::raise_failure(failures, fmt::format("rank {}: connecting mesh axis '{}' (ranks {}) failed: {}", impl_->rank,
                                                axes, fmt::join(ranks, ", "), detail::text_of(e)));
  }
}

Communicator& World::control() {
  if (!impl_->control) {
    std::vector<int64_t> ranks(static_cast<size_t>(impl_->size));
    std::iota(ranks.begin(), ranks.end(), 0);
    impl_->control = communicator(ranks, "control", "world");
    impl_->control->set_control();
  }
  return *impl_->control;
}

void World::abort(std::string_view why) noexcept {
  try {
    impl_->trace->failures()->abort_job(fmt::format("rank {}: {}", impl_->rank, why));
  } catch (const std::exception&) {
    // Out of memory for the text: the peers time out.
  }
}

namespace detail {

void settle_options(World::Impl& impl, WorldOptions options) {
  impl.device = options.device.value_or(c10::Device(c10::kCPU));
  if (!impl.device.is_cpu())
    throw ValueError(fmt::format("device {} is not in this build: use cpu", impl.device.str()));
  if (options.timeout <= std::chrono::milliseconds(0))
    throw ValueError(
        fmt::format("WorldOptions::timeout: expected a positive time, got {} ms", options.timeout.count()));
  impl.backend = resolve_backend(options.backend, impl.device);
  impl.options = std::move(options);
}

}  // namespace detail

namespace {

/// Connects to the job's store and makes sure that this is the job, and that no other process has this rank: two jobs
/// that were given one address must not mix.
void join(World::Impl& world, const detail::Launch& launch, std::chrono::milliseconds limit) {
  const auto address = fmt::format("{}:{}", launch.host, launch.port);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  c10d::TCPStoreOptions options;
  options.port = launch.port;
  options.isServer = launch.serves_store;
  options.numWorkers = static_cast<size_t>(launch.size);
  options.waitWorkers = false;
  options.multiTenant = true;  // a process may join its job more than once
  options.timeout = limit;
  c10::intrusive_ptr<c10d::TCPStore> store;
  try {
    store = c10::make_intrusive<c10d::TCPStore>(launch.host, options);
  } catch (const std::exception& e) {
    if (launch.serves_store)
      throw CommError(
          fmt::format("rank {} of {}: could not open the rendezvous store at {} (if another program has the "
                      "port, set MASTER_PORT to a free one): {}",
                      launch.rank, launch.size, address, detail::text_of(e)));
    throw CommError(
        fmt::format("rank {} of {}: could not reach the rendezvous store at {} within {} ms; rank 0, or "
                    "torchrun's agent, opens it: is it running there? {}",
                    launch.rank, launch.size, address, limit.count(), detail::text_of(e)));
  }
  store->setTimeout(world.options.timeout);
  // The n-th world of every process is one world.
  static std::atomic<int64_t> worlds = 0;
  const auto prefix = fmt::format("{}/{}", launch.store_prefix, worlds++);
  world.store = c10::make_intrusive<c10d::PrefixStore>(prefix, store);
  auto& failures = *world.trace->failures();
  std::string problem;
  try {
    const auto job = fmt::format("'{}' of {} ranks", launch.job, launch.size);
    if (launch.rank == 0)
      store->set(launch.job_key, std::vector<uint8_t>(job.begin(), job.end()));
    else if (!detail::wait_for_keys(*store, {launch.job_key}, limit, failures).empty())
      problem = fmt::format("rank 0 did not come to the store at {} within {} ms", address, limit.count());
    if (problem.empty())
      if (const auto found = store->get_to_str(launch.job_key); found != job)
        problem = fmt::format(
            "the store at {} is that of job {}, this is job {}: two jobs were given one address; "
            "set MASTER_PORT to a free one",
            address, found, job);
    if (problem.empty()) {
      char host[256] = "";
      ::gethostname(host, sizeof(host) - 1);
      const auto me = fmt::format("process {} on {}", ::getpid(), host);
      c10d::Store& shared = *world.store;
      if (const auto holder = shared.compareSet(fmt::format("fsdp/rank/{}", launch.rank), "", me); holder != me)
        problem = fmt::format(
            "{} at the store at {} has this rank already: two jobs were given one address (set "
            "MASTER_PORT to a free one), or two processes one rank",
            holder, address);
    }
    failures.watch(c10::make_intrusive<c10d::PrefixStore>(prefix, store->clone()), launch.serves_store);
  } catch (const std::exception& e) {
    problem = detail::text_of(e);
  }
  if (!problem.empty())
    detail::raise_failure(failures,
                          fmt::format("rank {}: init_world of {} ranks failed: {}", launch.rank, launch.size, problem));
  meet(world, "init_world",
       std::max(std::chrono::milliseconds(1),
                std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now())));
}

}  // namespace

std::shared_ptr<World> init_world(WorldOptions options) {
  auto impl = std::make_unique<World::Impl>();
  detail::settle_options(*impl, std::move(options));
  const auto launch = detail::read_environment([](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value ? std::optional<std::string>(value) : std::nullopt;
  });
  impl->rank = launch.rank;
  impl->size = launch.size;
  impl->local_rank = launch.local_rank;
  impl->single_host = launch.single_host;
  impl->trace = std::make_shared<detail::CommTrace>(launch.rank);
  auto& joined = *impl;
  const auto world = std::make_shared<World>(std::move(impl));  // ends what join() started when it throws
  if (launch.size == 1)
    joined.store = c10::make_intrusive<c10d::HashStore>();
  else
    join(joined, launch, joined.options.timeout);
  joined.store->setTimeout(joined.options.timeout);
  return world;
}

}  // namespace fsdp
