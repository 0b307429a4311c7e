#include <fsdp/buffer_split.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>

#include "layout/items.h"
#include "layout/padded_search.h"
#include "layout/shard_sizes.h"
#include "layout/split_covering.h"

namespace fsdp {

namespace {

using detail::Item;
using detail::Kind;

/// Divisions of more kinds than this are not enumerated: the smallest kinds are put together first.
constexpr size_t kMaxParts = 8;
/// Divisions planned in full per number of buffers; the others are judged by their lower bound.
constexpr size_t kPlanned = 8;
/// Padding below this share of the payload is not worth the search over sets of shards, of which these many are
/// planned.
constexpr double kSmallPadding = 0.01;
constexpr int kCoverings = 4;
constexpr int64_t kCoveringSteps = 2'000'000;

void check_options(const BufferSplitOptions& o) {
  if (o.max_buffers < 1) throw ValueError("expected max_buffers of at least 1, got " + std::to_string(o.max_buffers));
  if (!(o.tolerance >= 0)) throw ValueError("expected a tolerance of at least 0, got " + std::to_string(o.tolerance));
  if (o.min_saving < 0)
    throw ValueError("expected a min_saving of at least 0 elements, got " + std::to_string(o.min_saving));
}

/// Tensors that go into one buffer together.
struct Part {
  int64_t payload = 0, unit = 1;  // unit: of the largest tensor
  std::vector<Kind> kinds;
};

/// At most kMaxParts parts: kinds, the smallest put together or the largest halved.
std::vector<Part> parts_of(std::span<const Item> items) {
  std::vector<Part> parts;
  for (auto& k : detail::kinds_of(items))
    parts.push_back({k.size * static_cast<int64_t>(k.tensors.size()), k.unit, {std::move(k)}});
  while (parts.size() > kMaxParts) {
    const auto smallest = std::min_element(parts.begin(), parts.end(),
                                           [](const auto& a, const auto& b) { return a.payload < b.payload; });
    Part small = std::move(*smallest);
    parts.erase(smallest);
    // With its like if there is one, else with the next smallest.
    const auto into = std::min_element(parts.begin(), parts.end(), [&](const auto& a, const auto& b) {
      return std::pair(a.unit != small.unit, a.payload) < std::pair(b.unit != small.unit, b.payload);
    });
    into->payload += small.payload;
    into->kinds.insert(into->kinds.end(), small.kinds.begin(), small.kinds.end());
  }
  const auto copies = [](const Part& p) { return p.kinds.size() == 1 ? p.kinds[0].tensors.size() : 1; };
  while (parts.size() < kMaxParts) {
    const auto largest = std::max_element(parts.begin(), parts.end(), [&](const auto& a, const auto& b) {
      return std::pair(copies(a) > 1, a.payload) < std::pair(copies(b) > 1, b.payload);
    });
    if (largest == parts.end() || copies(*largest) == 1) break;
    Part half = *largest;
    auto &kept = largest->kinds[0].tensors, &moved = half.kinds[0].tensors;
    moved.erase(moved.begin(), moved.begin() + static_cast<std::ptrdiff_t>(kept.size() / 2));
    kept.resize(kept.size() / 2);
    for (Part* p : {&*largest, &half}) p->payload = p->kinds[0].size * static_cast<int64_t>(copies(*p));
    parts.push_back(std::move(half));
  }
  return parts;
}

/// One planned buffer, its segments not yet listed.
struct Planned {
  std::vector<size_t> tensors;  // ascending
  detail::PaddedPlan plan;
};

Planned plan_tensors(std::span<const Item> items, std::vector<size_t> tensors, int64_t dp_size) {
  std::sort(tensors.begin(), tensors.end());
  std::vector<Item> chosen;
  for (size_t t : tensors) chosen.push_back({chosen.size(), items[t].size, items[t].unit});
  auto plan = detail::plan_padded(chosen, dp_size);
  return {std::move(tensors), std::move(plan)};
}

/// A division of all tensors that have elements.
struct Division {
  int64_t total = 0;  // sum of the shards
  std::vector<Planned> buffers;
};

/// Plans and bounds of subsets of the parts (bit i: part i), each computed once.
class Subsets {
 public:
  Subsets(std::span<const Item> items, std::vector<Part> parts, int64_t dp_size)
      : items_(items), parts_(std::move(parts)), dp_size_(dp_size) {}

  size_t count() const { return parts_.size(); }

  /// Lower bound of the shard; largest value when it overflows.
  int64_t bound(uint32_t subset) {
    auto& b = bounds_.try_emplace(subset, -1).first->second;
    if (b >= 0) return b;
    std::vector<Kind> chosen;
    for (size_t p = 0; p < parts_.size(); ++p)
      if (subset >> p & 1) chosen.insert(chosen.end(), parts_[p].kinds.begin(), parts_[p].kinds.end());
    return b = detail::ShardSizes(chosen, dp_size_).next(1).value_or(std::numeric_limits<int64_t>::max());
  }

  const Planned& plan(uint32_t subset) {
    const auto it = plans_.find(subset);
    if (it != plans_.end()) return it->second;
    std::vector<size_t> tensors;
    for (size_t p = 0; p < parts_.size(); ++p)
      if (subset >> p & 1)
        for (const auto& k : parts_[p].kinds) tensors.insert(tensors.end(), k.tensors.begin(), k.tensors.end());
    return plans_.emplace(subset, plan_tensors(items_, std::move(tensors), dp_size_)).first->second;
  }

 private:
  std::span<const Item> items_;
  std::vector<Part> parts_;
  int64_t dp_size_;
  std::map<uint32_t, int64_t> bounds_;
  std::map<uint32_t, Planned> plans_;
};

struct Candidate {
  int64_t bound = 0;  // sum of the shards' lower bounds
  std::vector<uint32_t> subsets;
};

/// All ways to divide the parts from `next` on into exactly `buffers` non-empty subsets, some of which are begun.
void enumerate(Subsets& s, size_t next, size_t buffers, std::vector<uint32_t>& begun, std::vector<Candidate>& out) {
  const size_t left = s.count() - next;
  if (begun.size() + left < buffers) return;
  if (left == 0) {
    Candidate c{0, begun};
    for (uint32_t subset : begun)
      if (__builtin_add_overflow(c.bound, s.bound(subset), &c.bound)) return;
    out.push_back(std::move(c));
    return;
  }
  for (size_t b = 0; b < begun.size(); ++b) {
    begun[b] |= uint32_t{1} << next;
    enumerate(s, next + 1, buffers, begun, out);
    begun[b] &= ~(uint32_t{1} << next);
  }
  if (begun.size() == buffers) return;
  begun.push_back(uint32_t{1} << next);
  enumerate(s, next + 1, buffers, begun, out);
  begun.pop_back();
}

/// The smallest division of the parts found into exactly this many buffers, if its total is below `limit`; content with
/// `slack` more than the smallest.
std::optional<Division> divide_parts(Subsets& s, size_t buffers, int64_t limit, double slack) {
  std::vector<Candidate> candidates;
  std::vector<uint32_t> begun;
  enumerate(s, 0, buffers, begun, candidates);
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a.bound < b.bound; });
  std::optional<Division> best;
  for (size_t i = 0; i < std::min(candidates.size(), kPlanned); ++i) {
    if (candidates[i].bound >= limit) break;
    if (best && static_cast<double>(limit - candidates[i].bound) <= slack) break;
    Division d;
    for (uint32_t subset : candidates[i].subsets) {
      d.total += s.plan(subset).plan.shard;
      d.buffers.push_back(s.plan(subset));
    }
    if (d.total >= limit) continue;
    limit = d.total;
    best = std::move(d);
  }
  return best;
}

/// Where rows are few per rank: the sets of shards that hold the bound tensors by size, the smallest first, planned.
std::optional<Division> divide_by_covering(std::span<const Item> items, int64_t dp_size, int64_t max_buffers,
                                           int64_t limit) {
  detail::SplitCovering covering(items, dp_size, limit, max_buffers, kCoveringSteps);
  std::optional<Division> best;
  int64_t tried = 0;
  for (int i = 0; i < kCoverings && covering.is_tractable(); ++i) {
    const auto cover = covering.smallest(detail::SplitCovering::Doubt::kOut, tried);
    if (!cover || cover->total >= limit) break;
    tried = cover->total;
    auto tensors = cover->bound_tensors;
    std::vector<__int128> room;
    std::vector<bool> is_bound(items.size(), false);
    for (size_t b = 0; b < tensors.size(); ++b) {
      room.push_back(static_cast<__int128>(cover->shards[b]) * dp_size);
      for (size_t t : tensors[b]) {
        room[b] -= items[t].size;
        is_bound[t] = true;
      }
    }
    if (static_cast<int64_t>(tensors.size()) < max_buffers) {
      const int64_t bound_total = std::accumulate(cover->shards.begin(), cover->shards.end(), int64_t{0});
      room.push_back(static_cast<__int128>(cover->total - bound_total) * dp_size);
      tensors.emplace_back();
    }
    for (const auto& t : items) {
      if (is_bound[t.index] || t.size == 0) continue;
      // To the most room, among the buffers whose cuts suit it if there are any.
      size_t to = 0;
      const auto rank = [&](size_t b) {
        const int64_t shard = b < cover->shards.size() ? cover->shards[b] : 0;
        const bool suits = shard % t.unit == 0 || detail::least_shard_for_one_cut(t.size, t.unit) <= shard;
        return std::pair(suits && room[b] >= t.size, room[b]);
      };
      for (size_t b = 1; b < room.size(); ++b)
        if (rank(b) > rank(to)) to = b;
      tensors[to].push_back(t.index);
      room[to] -= t.size;
    }
    Division d;
    for (auto& buffer : tensors) {
      if (buffer.empty()) continue;
      d.buffers.push_back(plan_tensors(items, std::move(buffer), dp_size));
      d.total += d.buffers.back().plan.shard;
    }
    if (d.total >= limit) continue;
    limit = d.total;
    best = std::move(d);
  }
  return best;
}

}  // namespace

int64_t BufferSplit::size() const {
  int64_t n = 0;
  for (const auto& b : buffers) n = detail::checked_add(n, b.layout.size, "size");
  return n;
}

int64_t BufferSplit::payload() const {
  int64_t n = 0;
  for (const auto& b : buffers) n = detail::checked_add(n, b.layout.payload(), "payload");
  return n;
}

double BufferSplit::padding_ratio() const {
  const int64_t n = payload();
  return n == 0 ? 0.0 : static_cast<double>(size() - n) / static_cast<double>(n);
}

BufferSplit plan_buffers(std::span<const Shape> shapes, int64_t dp_size, const BufferSplitOptions& options) {
  check_options(options);
  BufferSplit split;
  std::vector<int64_t> everything(shapes.size());
  std::iota(everything.begin(), everything.end(), int64_t{0});
  split.buffers.push_back({std::move(everything), build_row_atomic_layout(shapes, dp_size, options.block_size)});
  const auto payload = static_cast<double>(split.payload());
  const double slack =
      std::max(options.tolerance * payload / static_cast<double>(dp_size), static_cast<double>(options.min_saving));
  const auto excess = [&](int64_t shard) {
    return static_cast<double>(shard) - payload / static_cast<double>(dp_size);
  };
  const int64_t one = split.size() / dp_size;
  if (excess(one) <= slack) return split;

  const auto items = detail::items_of(shapes, options.block_size);
  Subsets subsets(items, parts_of(items), dp_size);
  std::vector<Division> found;  // each smaller than the one before
  const auto smallest = [&] { return found.empty() ? one : found.back().total; };
  const auto most = std::min<size_t>(subsets.count(), static_cast<size_t>(options.max_buffers));
  for (size_t buffers = 2; buffers <= most && excess(smallest()) > slack; ++buffers)
    if (auto d = divide_parts(subsets, buffers, smallest(), slack)) found.push_back(std::move(*d));
  if (excess(smallest()) > std::max(slack, kSmallPadding * payload / static_cast<double>(dp_size)))
    if (auto d = divide_by_covering(items, dp_size, options.max_buffers, smallest())) found.push_back(std::move(*d));
  const double enough = static_cast<double>(smallest()) + slack;
  if (static_cast<double>(one) <= enough) return split;
  auto& chosen =
      *std::find_if(found.begin(), found.end(), [&](const auto& d) { return static_cast<double>(d.total) <= enough; });

  // Tensors without elements follow the first buffer.
  for (const auto& t : items)
    if (t.size == 0) chosen.buffers[0].tensors.push_back(t.index);
  split.buffers.clear();
  for (auto& b : chosen.buffers) {
    std::sort(b.tensors.begin(), b.tensors.end());
    std::vector<Shape> own;
    for (size_t t : b.tensors) own.push_back(shapes[t]);
    split.buffers.push_back(
        {{b.tensors.begin(), b.tensors.end()}, build_row_atomic_layout(own, dp_size, options.block_size)});
  }
  return split;
}

}  // namespace fsdp
