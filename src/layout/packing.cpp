#include "layout/packing.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

namespace fsdp::detail {

namespace {

constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();
/// Above this many steps of the search over orders, one shard size is not searched in full.
constexpr int64_t kExactSteps = 10'000;
constexpr size_t kLookAhead = 64;
/// Gaps kept open for later tensors: the latest ones.
constexpr size_t kOpenGaps = 16;

/// The rule for one kind at one shard size.
struct Fit {
  Fit(int64_t n, int64_t u, int64_t s) : size(n), unit(u), shard(s), whole(s / u * u), divides(s % u == 0) {}

  /// Smallest start at or behind `cursor`; kNowhere if no start is legal. Leftmost is best: whatever can follow a later
  /// start can follow this one too.
  int64_t start(int64_t cursor) const {
    const int64_t room = shard - cursor % shard;
    if (size <= room) return cursor;
    // Cut once in this shard, as late as possible, and again only if the shard is whole units.
    const int64_t head = room / unit * unit;
    if (head > 0 && (divides || size - head <= shard)) return cursor + room - head;
    // Otherwise from the next shard on: uncut, cut at every boundary, or cut once with as many units before it as fit.
    const int64_t boundary = cursor + room;
    if (size <= shard || divides) return boundary;
    return whole > 0 && size - whole <= shard ? boundary + shard - whole : kNowhere;
  }

  int64_t size, unit, shard, whole;
  bool divides;
};

struct Gap {
  int64_t begin, end;
};

/// Kinds in the given order, each tensor in the first gap that takes it, else behind everything.
std::optional<PaddedPlan> pack_first_fit(std::span<const Kind> kinds, std::span<const size_t> order, size_t tensors,
                                         int64_t shard, int64_t end, WorkBudget& budget) {
  PaddedPlan plan{std::vector<int64_t>(tensors, 0), shard};
  std::vector<Gap> gaps;
  int64_t cursor = 0, smallest = kNowhere;
  for (const auto& k : kinds) smallest = std::min(smallest, k.size);
  for (size_t k : order) {
    const Fit fit(kinds[k].size, kinds[k].unit, shard);
    for (size_t t : kinds[k].tensors) {
      int64_t at = kNowhere;
      budget.spend(1 + static_cast<int64_t>(gaps.size()));
      for (size_t g = 0; g < gaps.size(); ++g) {
        auto& gap = gaps[g];
        if (gap.end - gap.begin < fit.size) continue;
        const int64_t start = fit.start(gap.begin);
        if (start > gap.end - fit.size) continue;
        const Gap behind{start + fit.size, gap.end};
        gap.end = start;
        if (gap.begin == gap.end) {
          gap = behind;
        } else if (behind.begin < behind.end) {
          gaps.insert(gaps.begin() + static_cast<std::ptrdiff_t>(g) + 1, behind);
        }
        if (gaps[g].begin == gaps[g].end) gaps.erase(gaps.begin() + static_cast<std::ptrdiff_t>(g));
        at = start;
        break;
      }
      if (at == kNowhere) {
        at = fit.start(cursor);
        if (at > end - fit.size) return std::nullopt;
        if (at - cursor >= smallest) gaps.push_back({cursor, at});
        if (gaps.size() > kOpenGaps) gaps.erase(gaps.begin());
        cursor = at + fit.size;
      }
      plan.offsets[t] = at;
    }
  }
  return plan;
}

/// Next is always the first tensor, in the given order, that leaves no gap, or else the one that leaves the least.
/// Looks at a limited number of kinds at a time.
std::optional<PaddedPlan> pack_least_waste(std::span<const Kind> kinds, std::vector<size_t> order, size_t tensors,
                                           int64_t shard, int64_t end, WorkBudget& budget) {
  PaddedPlan plan{std::vector<int64_t>(tensors, 0), shard};
  std::vector<Fit> fits;
  for (const auto& k : kinds) fits.emplace_back(k.size, k.unit, shard);
  std::vector<size_t> placed(kinds.size(), 0);
  int64_t cursor = 0;
  while (!order.empty()) {
    int64_t at = kNowhere;
    size_t chosen = 0;
    for (size_t i = 0; i < std::min(order.size(), kLookAhead) && at > cursor; ++i) {
      budget.spend(1);
      const int64_t start = fits[order[i]].start(cursor);
      if (start < at) at = start, chosen = i;
    }
    const size_t k = order[chosen];
    if (at > end - fits[k].size) return std::nullopt;
    plan.offsets[kinds[k].tensors[placed[k]++]] = at;
    cursor = at + fits[k].size;
    if (placed[k] == kinds[k].tensors.size()) order.erase(order.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
  return plan;
}

/// Number of multisets of the kinds times the kinds, saturating at kExactSteps + 1.
int64_t exact_steps(std::span<const Kind> kinds) {
  auto n = static_cast<int64_t>(kinds.size());
  for (const auto& k : kinds) {
    n *= static_cast<int64_t>(k.tensors.size()) + 1;
    if (n > kExactSteps) return kExactSteps + 1;
  }
  return n;
}

/// Tries every order: the least end of each multiset of placed tensors, from those with one tensor fewer.
std::optional<PaddedPlan> pack_every_order(std::span<const Kind> kinds, size_t tensors, int64_t shard, int64_t end,
                                           WorkBudget& budget) {
  std::vector<Fit> fits;
  std::vector<size_t> stride;
  size_t states = 1;
  for (const auto& k : kinds) {
    fits.emplace_back(k.size, k.unit, shard);
    stride.push_back(states);
    states *= k.tensors.size() + 1;
  }
  budget.spend(static_cast<int64_t>(states * kinds.size()));
  struct State {
    int64_t end = kNowhere, start = 0;
    size_t last = 0;  // kind
  };
  std::vector<State> best(states);
  best[0].end = 0;
  std::vector<size_t> placed(kinds.size(), 0);
  for (size_t s = 0; s < states; ++s) {
    if (best[s].end != kNowhere) {
      for (size_t k = 0; k < kinds.size(); ++k) {
        if (placed[k] == kinds[k].tensors.size()) continue;
        const int64_t at = fits[k].start(best[s].end);
        auto& next = best[s + stride[k]];
        if (at <= end - fits[k].size && at + fits[k].size < next.end) next = {at + fits[k].size, at, k};
      }
    }
    for (size_t k = 0; k < kinds.size() && ++placed[k] > kinds[k].tensors.size(); ++k) placed[k] = 0;
  }
  if (best.back().end == kNowhere) return std::nullopt;
  PaddedPlan plan{std::vector<int64_t>(tensors, 0), shard};
  std::fill(placed.begin(), placed.end(), 0);
  for (size_t s = states - 1; s != 0; s -= stride[best[s].last]) {
    const size_t k = best[s].last;
    // Back to front, so that the last of the kind comes last in the buffer.
    plan.offsets[kinds[k].tensors[kinds[k].tensors.size() - 1 - placed[k]++]] = best[s].start;
  }
  return plan;
}

/// Tensors whose unit divides the shard need only whole units before the next cut, so those of one unit can stand in a
/// row as one tensor: fewer orders, at the price of not looking into the gaps between them.
std::vector<Kind> merge_dividing(std::span<const Kind> kinds, int64_t shard) {
  std::vector<Kind> merged;
  std::map<int64_t, size_t> by_unit;
  for (const auto& k : kinds) {
    if (shard % k.unit != 0 || k.size % k.unit != 0) {
      merged.push_back(k);
      continue;
    }
    const auto [it, is_new] = by_unit.try_emplace(k.unit, merged.size());
    if (is_new) merged.push_back({0, k.unit, {}});
    auto& row = merged[it->second];
    row.size += k.size * static_cast<int64_t>(k.tensors.size());
    row.tensors.insert(row.tensors.end(), k.tensors.begin(), k.tensors.end());
  }
  return merged;
}

std::optional<PaddedPlan> pack_merged(std::span<const Kind> kinds, size_t tensors, int64_t shard, int64_t end,
                                      WorkBudget& budget) {
  auto rows = merge_dividing(kinds, shard);
  std::vector<Kind> stand_ins = rows;
  std::vector<int64_t> sizes(tensors, 0);
  for (const auto& k : kinds)
    for (size_t t : k.tensors) sizes[t] = k.size;
  for (auto& r : stand_ins)
    if (shard % r.unit == 0 && r.size % r.unit == 0) r.tensors.resize(1);
  if (exact_steps(stand_ins) > kExactSteps) return std::nullopt;
  auto plan = pack_every_order(stand_ins, tensors, shard, end, budget);
  if (!plan) return std::nullopt;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (stand_ins[r].tensors.size() == rows[r].tensors.size()) continue;
    int64_t at = plan->offsets[rows[r].tensors[0]];
    for (size_t t : rows[r].tensors) {
      plan->offsets[t] = at;
      at += sizes[t];
    }
  }
  return plan;
}

/// Large units first: once they are through, the room to the next cut stays a multiple of the smaller ones.
std::vector<size_t> large_units_first(std::span<const Kind> kinds) {
  std::vector<size_t> order(kinds.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(kinds[a].unit, kinds[a].size) > std::pair(kinds[b].unit, kinds[b].size);
  });
  return order;
}

}  // namespace

bool is_exact(std::span<const Kind> kinds) { return exact_steps(kinds) <= kExactSteps; }

std::optional<PaddedPlan> pack_quickly(std::span<const Kind> kinds, size_t tensors, int64_t shard, int64_t dp_size,
                                       WorkBudget& budget) {
  return pack_first_fit(kinds, large_units_first(kinds), tensors, shard, shard * dp_size, budget);
}

std::optional<PaddedPlan> pack(std::span<const Kind> kinds, size_t tensors, int64_t shard, int64_t dp_size,
                               WorkBudget& budget) {
  const int64_t end = shard * dp_size;
  auto order = large_units_first(kinds);
  if (auto plan = pack_first_fit(kinds, order, tensors, shard, end, budget)) return plan;
  if (is_exact(kinds)) return pack_every_order(kinds, tensors, shard, end, budget);
  // Tensors that can be cut only once are the hard ones: these first, the largest first.
  const auto bulky = [&](size_t k) { return shard % kinds[k].unit == 0 ? int64_t{0} : kinds[k].size; };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return bulky(a) > bulky(b); });
  if (auto plan = pack_first_fit(kinds, order, tensors, shard, end, budget)) return plan;
  if (auto plan = pack_least_waste(kinds, order, tensors, shard, end, budget)) return plan;
  return pack_merged(kinds, tensors, shard, end, budget);
}

}  // namespace fsdp::detail
