/// Where the tensors of a group go in one flat buffer, and where it is cut, so that no cut splits a row (or a block of
/// rows). "Unit" below is the number of elements that must stay together: row size times block size.
#include <algorithm>
#include <numeric>
#include <optional>
#include <string>

#include <fsdp/layout.h>

#include "layout/checked.h"

namespace fsdp {
namespace {

using detail::checked_add;
using detail::checked_lcm;
using detail::checked_mul;
using detail::round_up;

struct Item {
  size_t index;  // of the tensor
  int64_t size, unit;
};

struct Plan {
  std::vector<int64_t> offsets;
  int64_t shard;
};

std::vector<Item> items_of(std::span<const Shape> shapes, int64_t block_size) {
  std::vector<Item> items;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const int64_t row = detail::row_elements(shapes[i]);
    const int64_t size = checked_mul(row, shapes[i][0], "tensor size");
    // A block longer than the tensor is the tensor.
    const int64_t rows = std::max<int64_t>(1, std::min(block_size, shapes[i][0]));
    items.push_back({i, size, checked_mul(row, rows, "block size")});
  }
  return items;
}

std::vector<int64_t> equal_cuts(int64_t shard, int64_t dp_size) {
  std::vector<int64_t> cuts(static_cast<size_t>(dp_size));
  for (int64_t r = 0; r < dp_size; ++r) cuts[r] = r * shard;
  return cuts;
}

/// Tensors on multiples of a common chunk (the lcm of the units), the gaps behind them filled with a tensor that ends on
/// the next multiple and then with small ones. Every multiple of the chunk is a legal cut whatever the number of ranks,
/// which wastes space where units have a large lcm. The order and the numbers are those of the Python planner.
Plan plan_by_chunk(const std::vector<Item>& items, int64_t dp_size) {
  int64_t chunk = 1;
  for (const auto& t : items) chunk = checked_lcm(chunk, t.unit, "common row size");
  std::vector<int64_t> offsets(items.size(), 0);
  std::vector<Item> regular, fragments;
  for (const auto& t : items) (t.size < chunk ? fragments : regular).push_back(t);
  std::stable_sort(fragments.begin(), fragments.end(), [](const auto& a, const auto& b) { return a.size > b.size; });

  std::vector<bool> placed(regular.size(), false);
  std::vector<Item> waiting = fragments;
  int64_t cursor = 0;
  for (size_t i = 0; i < regular.size(); ++i) {
    if (placed[i]) continue;
    const auto& t = regular[i];
    offsets[t.index] = cursor;
    const int64_t end = checked_add(cursor, t.size, "size");
    cursor = round_up(end, chunk, "size");
    if (cursor == end) continue;
    int64_t gap_begin = end, gap_end = cursor;
    for (size_t j = i + 1; j < regular.size(); ++j) {
      const auto& partner = regular[j];
      const int64_t head = partner.size % chunk;
      if (placed[j] || head == 0) continue;
      // It ends on a multiple of the chunk, so its head reaches back into the gap.
      const int64_t start = (cursor - head) / partner.unit * partner.unit;
      if (start < gap_begin) continue;
      offsets[partner.index] = start;
      placed[j] = true;
      gap_end = start;
      cursor = round_up(checked_add(start, partner.size, "size"), chunk, "size");
      break;
    }
    std::vector<Item> left;
    for (const auto& f : waiting) {
      const int64_t start = round_up(gap_begin, f.unit, "size");
      if (start <= gap_end && f.size <= gap_end - start) {
        offsets[f.index] = start;
        gap_begin = start + f.size;
      } else {
        left.push_back(f);
      }
    }
    waiting = std::move(left);
  }
  for (const auto& f : waiting) {
    offsets[f.index] = round_up(cursor, f.unit, "size");
    cursor = checked_add(offsets[f.index], f.size, "size");
  }
  const int64_t size = round_up(cursor, checked_mul(chunk, dp_size, "size"), "size");
  return {std::move(offsets), size / dp_size};
}

/// Smallest offset >= cursor at which a tensor may lie when cuts are multiples of `shard`: it crosses none, or the first
/// it crosses falls between two of its units and, if it crosses more, the shard is a multiple of the unit too.
std::optional<int64_t> fit(const Item& t, int64_t cursor, int64_t shard) {
  const int64_t room = shard - cursor % shard;
  if (t.size <= room) return cursor;
  const int64_t head = room / t.unit * t.unit;  // whole units before the first cut
  const int64_t start = cursor + room - head;
  const int64_t behind = t.size - head;
  if (head > 0 && (behind <= shard || shard % t.unit == 0)) return start;
  // No whole unit fits before the cut: begin at it.
  if (t.size <= shard || shard % t.unit == 0) return cursor + room;
  // Begin so that the first cut comes after as many units as a shard takes; then what is behind must end in time.
  const int64_t most = shard / t.unit * t.unit;
  if (most > 0 && t.size - most <= shard) return cursor + room + shard - most;
  return std::nullopt;
}

std::optional<Plan> plan_in_order(const std::vector<Item>& order, size_t tensors, int64_t shard, int64_t dp_size) {
  Plan plan{std::vector<int64_t>(tensors, 0), shard};
  const int64_t size = checked_mul(shard, dp_size, "size");
  int64_t cursor = 0;
  for (const auto& t : order) {
    if (t.size == 0) continue;
    auto at = fit(t, cursor, shard);
    if (!at || *at > size || t.size > size - *at) return std::nullopt;
    plan.offsets[t.index] = *at;
    cursor = *at + t.size;
  }
  return plan;
}

/// Rows need to be whole only where a cut falls: for shards from the smallest conceivable up, tries to lay the tensors
/// one after the other. A bounded number of shard sizes is tried, the more promising first; the plan by chunk is the
/// fallback, so the result is never larger.
Plan plan_padded(const std::vector<Item>& items, int64_t dp_size) {
  int64_t payload = 0;
  for (const auto& t : items) payload = checked_add(payload, t.size, "payload");
  std::optional<Plan> best;
  try {
    best = plan_by_chunk(items, dp_size);
  } catch (const ValueError&) {
    // The lcm of the units overflowed: the plan of last resort, everything on one rank, still stands.
  }
  // One rank can always hold everything; no plan needs more than that per rank.
  if (best && best->shard > payload) best.reset();
  const int64_t limit = best ? best->shard : payload;
  checked_mul(limit, dp_size, "size");
  const int64_t least = (payload + dp_size - 1) / dp_size;
  std::vector<std::vector<Item>> orders;
  auto by_unit = items;
  std::stable_sort(by_unit.begin(), by_unit.end(), [](const auto& a, const auto& b) { return a.unit > b.unit; });
  orders.push_back(std::move(by_unit));
  auto by_size = items;
  std::stable_sort(by_size.begin(), by_size.end(), [](const auto& a, const auto& b) { return a.size > b.size; });
  orders.push_back(std::move(by_size));
  orders.push_back(items);

  std::vector<int64_t> candidates;
  auto consider = [&](int64_t shard) {
    if (shard >= least && shard > 0 && shard < limit) candidates.push_back(shard);
  };
  for (int64_t k = 0; k < 64; ++k) consider(least + k);
  int64_t common = 1;
  for (const auto& t : items) {
    // Tensors that span many ranks want a shard that is a multiple of their unit, several of them a common multiple.
    for (int64_t k = 0; k < 4; ++k) consider((least + t.unit - 1) / t.unit * t.unit + k * t.unit);
    if (t.size > 2 * least && common > 0) {
      int64_t next;
      common = __builtin_mul_overflow(common / std::gcd(common, t.unit), t.unit, &next) ? 0 : next;
    }
  }
  if (common > 1)
    for (int64_t k = 0; k < 64 && common < limit; ++k) consider((least + common - 1) / common * common + k * common);
  for (int64_t k = 1; k < 64; ++k) consider(least + (limit - least) / 64 * k);
  consider(limit - 1);
  std::sort(candidates.begin(), candidates.end());
  candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
  for (auto shard : candidates)
    for (const auto& order : orders)
      if (auto plan = plan_in_order(order, items.size(), shard, dp_size)) return std::move(*plan);
  if (best) return std::move(*best);
  return std::move(plan_in_order(items, items.size(), payload, dp_size).value());
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
  if (dp_size < 1) throw ValueError("expected at least one rank, got dp_size " + std::to_string(dp_size));
  if (block_size < 1) throw ValueError("expected blocks of at least one row, got block_size " + std::to_string(block_size));
  const auto items = items_of(shapes, block_size);
  if (layout == ShardLayout::kUnpadded) return plan_unpadded(shapes, items, dp_size);
  auto plan = plan_padded(items, dp_size);
  return GlobalLayout({shapes.begin(), shapes.end()}, std::move(plan.offsets), plan.shard * dp_size,
                      equal_cuts(plan.shard, dp_size));
}

}  // namespace fsdp
