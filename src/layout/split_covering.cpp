#include "layout/split_covering.h"

#include <algorithm>
#include <set>

#include "layout/shard_sizes.h"

namespace fsdp::detail {

namespace {

/// More possible shards (of one row size; of all, twice as many) or row sizes than these are not enumerated.
constexpr int64_t kMaxShards = 200;
constexpr size_t kMaxUnits = 6;
/// Steps of judging one set of shards; then it is in doubt.
constexpr int64_t kStepsPerSet = 2'000;

}  // namespace

SplitCovering::SplitCovering(std::span<const Item> items, int64_t dp_size, int64_t known, int64_t max_buffers,
                             int64_t steps)
    : dp_size_(dp_size),
      known_(known),
      max_buffers_(max_buffers),
      steps_(steps),
      mean_(ceil_div(payload_of(items), dp_size)) {
  for (auto& k : kinds_of(items)) {
    mean_ = std::max(mean_, k.unit);
    // Short rows bind little and would take long to enumerate: left out, which leaves a lower bound one.
    if (known / k.unit > kMaxShards) continue;
    if (least_shard_for_one_cut(k.size, k.unit) >= known) bound_.push_back(std::move(k));
  }
  std::stable_sort(bound_.begin(), bound_.end(), [](const auto& a, const auto& b) { return a.size > b.size; });
  std::set<int64_t> shards;
  for (const auto& k : bound_) {
    const auto it = std::find(units_.begin(), units_.end(), k.unit);
    const auto u = static_cast<size_t>(it - units_.begin());
    if (it == units_.end()) {
      units_.push_back(k.unit);
      unit_payloads_.push_back(0);
    }
    unit_payloads_[u] += k.size * static_cast<int64_t>(k.tensors.size());
    is_tractable_ = is_tractable_ && units_.size() <= kMaxUnits;
    for (int64_t s = k.unit; is_tractable_ && s < known; s += k.unit) shards.insert(s);
  }
  is_tractable_ = is_tractable_ && shards.size() <= static_cast<size_t>(2 * kMaxShards);
  shards_.assign(shards.begin(), shards.end());
}

std::optional<SplitCovering::Solution> SplitCovering::smallest(Doubt doubt, int64_t more_than) {
  doubt_ = doubt;
  more_than_ = more_than;
  best_.reset();
  chosen_.clear();
  search(0, max_buffers_, 0);
  if (steps_ < 0 && doubt == Doubt::kFits) best_ = Solution{mean_, {}, {}};
  return std::move(best_);
}

/// Adds buffers of ascending shards to chosen_; `left` more may be added, one of which may hold unbound tensors only.
void SplitCovering::search(size_t from, int64_t left, int64_t total) {
  const int64_t whole = left > 0 ? std::max(total, mean_) : total;
  const int64_t beat = best_ ? best_->total : known_;
  if (whole >= mean_ && whole > more_than_ && whole < beat && room_by_rows()) {
    const auto answer = fits();
    if (answer == Answer::kYes || (answer == Answer::kUnsure && doubt_ == Doubt::kFits)) {
      best_ = Solution{whole, chosen_, std::vector<std::vector<size_t>>(chosen_.size())};
      if (answer == Answer::kYes)
        for (size_t i = 0; i < taken_.size(); ++i) {
          auto& to = best_->bound_tensors[i % chosen_.size()];
          to.insert(to.end(), taken_[i].begin(), taken_[i].end());
        }
    }
  }
  if (left == 0) return;
  --steps_;
  for (size_t i = from; i < shards_.size() && total + shards_[i] < (best_ ? best_->total : known_); ++i) {
    if (steps_ < 0) return;
    chosen_.push_back(shards_[i]);
    search(i, left - 1, total + shards_[i]);
    chosen_.pop_back();
  }
}

/// Necessary and quick: for every set of row sizes, the buffers that some of them divide have room for all of them.
bool SplitCovering::room_by_rows() {
  steps_ -= int64_t{1} << units_.size();
  for (uint32_t set = 1; set < uint32_t{1} << units_.size(); ++set) {
    __int128 need = 0, room = 0;
    for (size_t u = 0; u < units_.size(); ++u)
      if (set >> u & 1) need += unit_payloads_[u];
    for (int64_t shard : chosen_) {
      bool divides = false;
      for (size_t u = 0; u < units_.size(); ++u) divides |= (set >> u & 1) && shard % units_[u] == 0;
      if (divides) room += static_cast<__int128>(shard) * dp_size_;
    }
    if (room < need) return false;
  }
  return true;
}

SplitCovering::Answer SplitCovering::fits() {
  room_.clear();
  for (int64_t shard : chosen_) room_.push_back(static_cast<__int128>(shard) * dp_size_);
  taken_.assign(bound_.size() * chosen_.size(), {});
  steps_here_ = kStepsPerSet;
  return bound_.empty() ? Answer::kYes : fits(0, bound_[0].tensors.size(), 0);
}

/// Whether `left` tensors of one kind fit into the buffers from `buffer` on, and all of the smaller kinds after them.
SplitCovering::Answer SplitCovering::fits(size_t kind, size_t left, size_t buffer) {
  if (left == 0) return ++kind == bound_.size() ? Answer::kYes : fits(kind, bound_[kind].tensors.size(), 0);
  if (buffer == chosen_.size()) return Answer::kNo;
  if (--steps_here_ < 0 || --steps_ < 0) return Answer::kUnsure;
  const auto& k = bound_[kind];
  auto& taken = taken_[kind * chosen_.size() + buffer];
  const bool divides = chosen_[buffer] % k.unit == 0;
  const auto most = divides ? static_cast<size_t>(std::min<__int128>(left, room_[buffer] / k.size)) : 0;
  // As many as possible first.
  for (size_t n = most + 1; n-- > 0;) {
    const __int128 size = static_cast<__int128>(n) * k.size;
    room_[buffer] -= size;
    const auto first = k.tensors.end() - static_cast<std::ptrdiff_t>(left);
    taken.assign(first, first + static_cast<std::ptrdiff_t>(n));
    const auto answer = fits(kind, left - n, buffer + 1);
    room_[buffer] += size;
    if (answer != Answer::kNo) return answer;
  }
  taken.clear();
  return Answer::kNo;
}

}  // namespace fsdp::detail
