#pragma once

#include <cstdint>
#include <span>

#include "layout/items.h"

namespace fsdp::detail {

/// The smallest equal shard the search finds, with a place for every tensor. Never larger than plan_by_chunk's, nor
/// than the whole payload. ValueError when no plan's size fits in 64 bits.
PaddedPlan plan_padded(std::span<const Item> items, int64_t dp_size);

/// A shard size below which no plan exists (ValueError as above).
int64_t padded_shard_bound(std::span<const Item> items, int64_t dp_size);

}  // namespace fsdp::detail
