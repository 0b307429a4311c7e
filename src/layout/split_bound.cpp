/// A lower bound for every division into buffers. Given a plan to beat, every buffer's shard is below that plan's
/// total; tensors too large to be cut once in such a shard have rows that divide the shard of whichever buffer holds
/// them. What remains is a small covering problem over the multiples of those rows, solved by enumeration.
#include <algorithm>
#include <set>

#include <fsdp/buffer_split.h>

#include "layout/items.h"
#include "layout/shard_sizes.h"

namespace fsdp {

namespace {

/// With more possible shards than this the enumeration takes too long, and padding is small anyway.
constexpr int64_t kMaxShards = 200;

/// Bounds the time; once spent, every choice of shards counts as possible, which leaves the bound valid.
constexpr int64_t kSteps = 3'000'000;

struct Covering {
  std::vector<detail::Kind> bound;  // kinds whose rows divide the shard of their buffer
  std::vector<int64_t> shards;      // possible sizes of a buffer with bound tensors, ascending
  int64_t dp_size = 1, mean = 0;    // mean: least total shard
  int64_t best = 0;                 // least total found
  int64_t steps = kSteps;

  /// Whether the bound tensors from kind `k` on, `left` of that kind, fit by size into what room the buffers have.
  bool covers(std::span<const int64_t> chosen, std::vector<__int128>& room, size_t k, size_t left, size_t buffer) {
    if (--steps < 0 || k == bound.size()) return true;
    if (left == 0) return covers(chosen, room, k + 1, k + 1 < bound.size() ? bound[k + 1].tensors.size() : 0, 0);
    if (buffer == chosen.size()) return false;
    if (chosen[buffer] % bound[k].unit == 0) {
      // As many as possible first: the last buffer takes all that are left.
      const auto most = std::min<__int128>(left, room[buffer] / bound[k].size);
      for (auto n = static_cast<size_t>(most); n > 0; --n) {
        const __int128 taken = static_cast<__int128>(n) * bound[k].size;
        room[buffer] -= taken;
        const bool fits = covers(chosen, room, k, left - n, buffer + 1);
        room[buffer] += taken;
        if (fits) return true;
      }
    }
    return covers(chosen, room, k, left, buffer + 1);
  }

  bool covers(std::span<const int64_t> chosen) {
    if (bound.empty()) return true;
    std::vector<__int128> room;
    for (int64_t shard : chosen) room.push_back(static_cast<__int128>(shard) * dp_size);
    return covers(chosen, room, 0, bound[0].tensors.size(), 0);
  }

  /// Adds buffers in ascending size; `left` more may be added, one of which may hold unbound tensors only.
  void search(std::vector<int64_t>& chosen, size_t from, int64_t left, int64_t total) {
    const int64_t whole = left > 0 ? std::max(total, mean) : total;
    if (whole >= mean && whole < best && covers(chosen)) best = whole;
    if (left == 0) return;
    for (size_t i = from; i < shards.size() && total + shards[i] < best; ++i) {
      chosen.push_back(shards[i]);
      search(chosen, i, left - 1, total + shards[i]);
      chosen.pop_back();
    }
  }
};

}  // namespace

int64_t buffer_split_lower_bound(std::span<const Shape> shapes, int64_t dp_size, const BufferSplitOptions& options) {
  const int64_t known = plan_buffers(shapes, dp_size, options).size() / dp_size;
  const auto items = detail::items_of(shapes, options.block_size);
  Covering c;
  c.dp_size = dp_size;
  c.mean = detail::ceil_div(detail::payload_of(items), dp_size);
  for (auto& k : detail::kinds_of(items)) {
    c.mean = std::max(c.mean, k.unit);
    if (detail::least_shard_for_one_cut(k.size, k.unit) >= known) c.bound.push_back(std::move(k));
  }
  std::stable_sort(c.bound.begin(), c.bound.end(), [](const auto& a, const auto& b) { return a.size > b.size; });
  std::set<int64_t> shards;
  for (const auto& k : c.bound) {
    if (known / k.unit > kMaxShards) return c.mean * dp_size;
    for (int64_t s = k.unit; s <= known; s += k.unit) shards.insert(s);
  }
  if (shards.size() > static_cast<size_t>(kMaxShards)) return c.mean * dp_size;
  c.shards.assign(shards.begin(), shards.end());
  c.best = known;
  std::vector<int64_t> chosen;
  c.search(chosen, 0, options.max_buffers, 0);
  return c.best * dp_size;
}

}  // namespace fsdp
