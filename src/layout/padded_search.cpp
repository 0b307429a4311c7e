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
constexpr int64_t kSearchSteps = 200'000;
/// The first sizes are tried in turn: in practice the first or second succeeds.
constexpr int kFirstSizes = 8;

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
    try {
      accept(plan_by_chunk(items_, dp_size_));
    } catch (const ValueError&) {
      // The common multiple overflowed; the search does not need it.
    }
    auto shard = sizes_.next(1);
    for (int i = 0; i < kFirstSizes && shard && *shard < limit_; ++i) {
      if (try_size(*shard)) return std::move(*best_);
      shard = sizes_.next(*shard + 1);
    }
    if (shard && *shard < limit_) {
      halve(*shard);
      // What the halving jumped over.
      for (; shard && *shard < limit_ && budget_.left() > 0; shard = sizes_.next(*shard + 1))
        if (try_size(*shard)) break;
    }
    if (!best_) overflow("size");
    return std::move(*best_);
  }

 private:
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
  /// one, and a tensor cut often at multiples of the modulus can be cut at larger multiples. So bisect each
  /// progression.
  void halve(int64_t from) {
    std::set<int64_t> moduli;
    for (const auto& p : sizes_.progressions()) {
      for (const auto& k : kinds_) {
        int64_t m;
        if (!__builtin_mul_overflow(p.modulus / std::gcd(p.modulus, k.unit), k.unit, &m) && moduli.insert(m).second)
          bisect(m, std::max(p.from, from));
      }
      if (moduli.insert(p.modulus).second) bisect(p.modulus, std::max(p.from, from));
    }
  }

  void bisect(int64_t modulus, int64_t from) {
    int64_t low = ceil_div(from, modulus), high = ceil_div(limit_, modulus);
    while (low < high && budget_.left() > 0) {
      const int64_t middle = low + (high - low) / 2;
      if (try_size(middle * modulus)) {
        high = middle;
      } else {
        low = middle + 1;
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
