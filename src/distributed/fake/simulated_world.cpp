#include <fsdp/distributed/simulated_world.h>

#include <utility>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "distributed/world_impl.h"

namespace fsdp {

std::shared_ptr<World> simulate_world(int64_t rank, int64_t size, WorldOptions options) {
  if (rank < 0 || rank >= size)
    throw ValueError(fmt::format("simulate_world: expected a rank from 0 to {}, got {}", size - 1, rank));
  options.backend = "fake";
  auto impl = std::make_unique<World::Impl>();
  detail::settle_options(*impl, std::move(options));
  impl->rank = rank;
  impl->size = size;
  impl->simulated = true;
  impl->store = c10::make_intrusive<c10d::HashStore>();
  impl->trace = std::make_shared<detail::CommTrace>(rank);
  return std::make_shared<World>(std::move(impl));
}

}  // namespace fsdp
