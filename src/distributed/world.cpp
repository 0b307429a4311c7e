#include <fsdp/distributed/world.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

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
World::~World() = default;

int64_t World::rank() const { return impl_->rank; }
int64_t World::size() const { return impl_->size; }
int64_t World::local_rank() const { return impl_->local_rank; }
c10::Device World::device() const { return impl_->device; }
const WorldOptions& World::options() const { return impl_->options; }
const c10::intrusive_ptr<c10d::Store>& World::store() const { return impl_->store; }
const std::shared_ptr<detail::CommTrace>& World::trace() const { return impl_->trace; }
int64_t World::next_mesh_id() { return impl_->meshes++; }

void World::barrier() {
  if (impl_->size == 1) return;
  const auto number = impl_->barriers++;
  const auto key = [&](const char* event, int64_t r) { return fmt::format("fsdp/barrier/{}/{}/{}", number, event, r); };
  std::vector<int64_t> missing;
  /// Looks until all ranks have set their key; false at the deadline.
  const auto wait_for_all = [&](const char* event, std::chrono::milliseconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    auto pause = std::chrono::microseconds(50);
    missing.clear();
    for (int64_t r = 0; r < impl_->size; ++r) missing.push_back(r);
    while (true) {
      std::erase_if(missing, [&](int64_t r) { return impl_->store->check({key(event, r)}); });
      if (missing.empty()) return true;
      if (impl_->aborted) throw CommError(fmt::format("rank {}: barrier was aborted", impl_->rank));
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(20'000));
    }
  };
  const std::vector<uint8_t> set{1};
  try {
    impl_->store->set(key("arrived", impl_->rank), set);
    if (!wait_for_all("arrived", impl_->options.timeout))
      throw CommError(fmt::format("rank {}: barrier timed out after {} ms; missing ranks: {}", impl_->rank,
                                  impl_->options.timeout.count(), fmt::join(missing, ", ")));
    // Rank 0's process may serve the store and end right after this: it leaves last, or the others lose the store while
    // they still look. A rank that dies between the two is no failure of this barrier, so the wait is short.
    impl_->store->set(key("left", impl_->rank), set);
    constexpr std::chrono::milliseconds kGrace(10'000);
    if (impl_->rank == 0) wait_for_all("left", std::min(kGrace, impl_->options.timeout));
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {
    throw CommError(fmt::format("rank {}: barrier failed: {}", impl_->rank, e.what()));
  }
}

std::shared_ptr<Communicator> World::communicator(std::span<const int64_t> ranks, const std::string& key,
                                                  const std::string& axes) {
  const auto me = std::find(ranks.begin(), ranks.end(), impl_->rank);
  if (me == ranks.end())
    throw ValueError(
        fmt::format("rank {} is not one of the communicator's ranks {}", impl_->rank, fmt::join(ranks, ", ")));
  if (impl_->aborted) throw CommError(fmt::format("rank {}: the world was aborted", impl_->rank));
  auto comm = detail::make_communicator(
      impl_->backend, {c10::make_intrusive<c10d::PrefixStore>("fsdp/comm/" + key, impl_->store), me - ranks.begin(),
                       static_cast<int64_t>(ranks.size()), impl_->device, axes, impl_->options.timeout, impl_->trace,
                       impl_->single_host});
  std::lock_guard lock(impl_->mutex);
  std::erase_if(impl_->communicators, [](const auto& c) { return c.expired(); });
  impl_->communicators.push_back(comm);
  if (impl_->keep_communicators) impl_->kept.push_back(comm);
  if (impl_->aborted) comm->abort();
  return comm;
}

void World::abort() noexcept {
  impl_->aborted = true;
  std::vector<std::shared_ptr<Communicator>> live;
  {
    std::lock_guard lock(impl_->mutex);
    for (const auto& weak : impl_->communicators)
      if (auto comm = weak.lock()) live.push_back(std::move(comm));
  }
  for (const auto& comm : live) comm->abort();
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
  const auto timeout = impl->options.timeout;
  if (launch.size == 1) {
    impl->store = c10::make_intrusive<c10d::HashStore>();
  } else {
    c10d::TCPStoreOptions store;
    store.port = launch.port;
    store.isServer = launch.serves_store;
    store.numWorkers = static_cast<size_t>(launch.size);
    store.waitWorkers = false;
    store.timeout = timeout;
    try {
      impl->store = c10::make_intrusive<c10d::PrefixStore>(launch.store_prefix,
                                                           c10::make_intrusive<c10d::TCPStore>(launch.host, store));
    } catch (const std::exception& e) {
      throw CommError(fmt::format("rank {} of {} could not {} the rendezvous store at {}:{} within {} ms: {}",
                                  launch.rank, launch.size, launch.serves_store ? "open" : "reach", launch.host,
                                  launch.port, timeout.count(), e.what()));
    }
  }
  impl->store->setTimeout(timeout);
  auto world = std::make_shared<World>(std::move(impl));
  world->barrier();
  return world;
}

}  // namespace fsdp
