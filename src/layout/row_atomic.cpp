/// Where the tensors of a group go in one flat buffer, and where it is cut, so that no cut splits a row or block.
#include <string>

#include <fsdp/layout.h>

#include "layout/items.h"
#include "layout/padded_search.h"

namespace fsdp {
namespace {

using detail::checked_add;
using detail::Item;

void check_arguments(int64_t dp_size, int64_t block_size) {
  if (dp_size < 1) throw ValueError("expected at least one rank, got dp_size " + std::to_string(dp_size));
  if (block_size < 1)
    throw ValueError("expected blocks of at least one row, got block_size " + std::to_string(block_size));
}

std::vector<int64_t> equal_cuts(int64_t shard, int64_t dp_size) {
  std::vector<int64_t> cuts(static_cast<size_t>(dp_size));
  for (int64_t r = 0; r < dp_size; ++r) cuts[r] = r * shard;
  return cuts;
}

/// No padding: tensors one after the other, each cut moved from its even place to the nearest legal one before it, or
/// behind it where that is nearer.
GlobalLayout plan_unpadded(std::span<const Shape> shapes, const std::vector<Item>& items, int64_t dp_size) {
  std::vector<int64_t> offsets;
  int64_t size = 0;
  for (const auto& t : items) {
    offsets.push_back(size);
    size = checked_add(size, t.size, "size");
  }
  std::vector<int64_t> cuts{0};
  size_t at = 0;  // tensor that the even place of the cut falls into
  for (int64_t r = 1; r < dp_size; ++r) {
    const auto even = static_cast<int64_t>(static_cast<__int128>(size) * r / dp_size);
    while (at + 1 < items.size() && offsets[at] + items[at].size <= even) ++at;
    int64_t cut = even;
    if (at < items.size() && even > offsets[at] && even < offsets[at] + items[at].size) {
      const int64_t inside = even - offsets[at], down = inside / items[at].unit * items[at].unit;
      const int64_t up = std::min(down + items[at].unit, items[at].size);
      cut = offsets[at] + (inside - down <= up - inside ? down : up);
    }
    cuts.push_back(std::max(cut, cuts.back()));
  }
  return GlobalLayout({shapes.begin(), shapes.end()}, std::move(offsets), size, std::move(cuts));
}

}  // namespace

GlobalLayout build_row_atomic_layout(std::span<const Shape> shapes, int64_t dp_size, int64_t block_size,
                                     ShardLayout layout) {
  check_arguments(dp_size, block_size);
  const auto items = detail::items_of(shapes, block_size);
  if (layout == ShardLayout::kUnpadded) return plan_unpadded(shapes, items, dp_size);
  auto plan = detail::plan_padded(items, dp_size);
  return GlobalLayout({shapes.begin(), shapes.end()}, std::move(plan.offsets), plan.shard * dp_size,
                      equal_cuts(plan.shard, dp_size));
}

int64_t row_atomic_lower_bound(std::span<const Shape> shapes, int64_t dp_size, int64_t block_size) {
  check_arguments(dp_size, block_size);
  return detail::padded_shard_bound(detail::items_of(shapes, block_size), dp_size) * dp_size;
}

}  // namespace fsdp
