#pragma once

#include <cstdint>
#include <memory>

#include <fsdp/distributed/world.h>

namespace fsdp {

/// A world of `size` ranks of which only this one, `rank`, is there: collectives are recorded and move nothing, so what
/// other ranks would send is left as it was in memory, and numbers mean nothing; counts, bytes, order and memory are
/// those of the real job. One process can so build and step one rank of a job of thousands. Barriers and the check that
/// all ranks built the same model have nobody to wait for. Options but the backend apply. ValueError for a rank outside
/// [0, size).
std::shared_ptr<World> simulate_world(int64_t rank, int64_t size, WorldOptions options = {});

}  // namespace fsdp
