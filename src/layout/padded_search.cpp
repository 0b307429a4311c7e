#include "layout/padded_search.h"

#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "layout/packing.h"
#include "layout/shard_sizes.h"

namespace fsdp::detail {

namespace {

/// About a few milliseconds on one core.
constexpr int64_t kSearchSteps = 300'000;
/// The first sizes are tried in turn: in practice the first or second succeeds.
constexpr int kFirstSizes = 4;
/// The search ends at a shard at most 1/2^kNearBits (8e-6) above the lower bound: exact below 131072 elements.
constexpr int kNearBits = 17;

/// Everything on the first rank, one tensor after the other.
PaddedPlan plan_on_one_rank(std::span<const Item> items) {
  PaddedPlan plan;
  for (const auto& t : items) {
    plan.offsets.push_back(plan.shard);
    plan.shard += t.size;
  }
  return plan;
}

class Search {
 public:
  Search(std::span<const Item> items, int64_t dp_size)
      : items_(items), dp_size_(dp_size), kinds_(kinds_of(items)), sizes_(kinds_, dp_size) {}

  PaddedPlan run() {
    best_ = plan_on_one_rank(items_);
    const int64_t largest = std::numeric_limits<int64_t>::max() / dp_size_;
    if (best_->shard > largest) best_.reset();
    limit_ = best_ ? best_->shard : largest;
    const auto first = sizes_.next(1);
    if (!first || *first >= limit_) return finish();
    if (try_size(*first)) return finish();
    near_ = *first + (*first >> kNearBits);
    if (auto shard = sizes_.next(near_); shard && *shard == near_) try_size(near_);
    use_plan_by_chunk(*first);
    find_any(*first);
    auto shard = sizes_.next(*first + 1);
    for (int i = 0; i < kFirstSizes && shard && is_open(*shard); ++i) {
      if (try_size(*shard)) return finish();
      shard = sizes_.next(*shard + 1);
    }
    if (shard && is_open(*shard)) search_progressions(*shard);
    // What the steps jumped over.
    for (; shard && is_open(*shard); shard = sizes_.next(*shard + 1))
      if (try_size(*shard)) break;
    return finish();
  }

 private:
  /// Whether a plan of this size is worth looking for.
  bool is_open(int64_t shard) const { return shard < limit_ && limit_ > near_ && budget_.left() > 0; }

  PaddedPlan finish() {
    if (!best_) overflow("size");
    return std::move(*best_);
  }

  void use_plan_by_chunk(int64_t least) {
    try {
      int64_t chunk = 1;
      for (const auto& k : kinds_) chunk = checked_lcm(chunk, k.unit, "common row size");
      // Its shard is a multiple of the chunk: it takes time, and may be out of reach.
      if (round_up(least, chunk, "size") < limit_) accept(plan_by_chunk(items_, dp_size_));
    } catch (const ValueError&) {
      // The common multiple overflowed; the search does not need it.
    }
  }

  /// With many unlike tensors the search can run out of steps before it finds anything: a plan within a small factor
  /// comes first, by the quick packing and whatever it costs.
  void find_any(int64_t first) {
    if (limit_ / 2 <= first) return;
    for (int64_t extra = first / 32 + 1; extra < (limit_ - first) / 2; extra *= 2) {
      const auto shard = sizes_.next(first + extra);
      if (!shard || *shard >= limit_) return;
      if (auto plan = pack_quickly(kinds_, items_.size(), *shard, dp_size_, budget_)) return accept(std::move(*plan));
    }
  }

  void accept(PaddedPlan plan) {
    if (plan.shard >= limit_) return;
    limit_ = plan.shard;
    best_ = std::move(plan);
  }

  bool try_size(int64_t shard) {
    auto plan = pack(kinds_, items_.size(), shard, dp_size_, budget_);
    if (plan) accept(std::move(*plan));
    return plan.has_value();
  }

  /// Among the multiples of one modulus a larger shard is never harder to pack: what stood in a shard fits in a larger
  /// one, and a tensor cut often at multiples of the modulus can be cut at larger multiples. So each progression of
  /// sizes is searched with growing steps, then by halves.
  void search_progressions(int64_t from) {
    std::set<int64_t> seen;
    const auto progressions = sizes_.progressions();
    for (const auto& p : progressions)
      if (seen.insert(p.modulus).second) search_multiples(p.modulus, std::max(p.from, from));
    // Rows that need not divide the shard pack better where they do.
    for (const auto& p : progressions)
      for (const auto& k : kinds_) {
        int64_t m;
        if (!__builtin_mul_overflow(p.modulus / std::gcd(p.modulus, k.unit), k.unit, &m) && seen.insert(m).second)
          search_multiples(m, std::max(p.from, from));
      }
  }

  void search_multiples(int64_t modulus, int64_t from) {
    int64_t low = ceil_div(from, modulus), high = ceil_div(limit_, modulus);
    int64_t step = 1;
    while (low < high && is_open(low * modulus)) {
      // `step` grows until the first success, which sets `high` within reach of it; then the middle is nearer.
      const int64_t middle = low + std::min(step - 1, (high - low) / 2);
      if (try_size(middle * modulus)) {
        high = middle;
      } else {
        low = middle + 1;
        if (step <= (high - low) / 4) step *= 4;
      }
    }
  }

  std::span<const Item> items_;
  int64_t dp_size_;
  std::vector<Kind> kinds_;
  ShardSizes sizes_;
  WorkBudget budget_{kSearchSteps};
  std::optional<PaddedPlan> best_;
  int64_t limit_ = 0;  // a plan must be smaller
  int64_t near_ = 0;   // a shard this small ends the search
};

}  // namespace

std::vector<Kind> kinds_of(std::span<const Item> items) {
  std::vector<Kind> kinds;
  std::map<std::pair<int64_t, int64_t>, size_t> seen;
  for (const auto& t : items) {
    if (t.size == 0) continue;
    const auto [it, is_new] = seen.try_emplace({t.size, t.unit}, kinds.size());
    if (is_new) kinds.push_back({t.size, t.unit, {}});
    kinds[it->second].tensors.push_back(t.index);
  }
  return kinds;
}

PaddedPlan plan_padded(std::span<const Item> items, int64_t dp_size) {
  if (payload_of(items) == 0) return {std::vector<int64_t>(items.size(), 0), 0};
  return Search(items, dp_size).run();
}

int64_t padded_shard_bound(std::span<const Item> items, int64_t dp_size) {
  if (payload_of(items) == 0) return 0;
  const auto shard = ShardSizes(kinds_of(items), dp_size).next(1);
  if (!shard || *shard > std::numeric_limits<int64_t>::max() / dp_size) overflow("size");
  return *shard;
}

}  // namespace fsdp::detail
