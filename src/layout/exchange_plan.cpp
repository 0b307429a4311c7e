#include "layout/exchange_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "layout/transition_plan.h"

namespace fsdp::detail {
namespace {

using Range = std::pair<int64_t, int64_t>;  // elements of a layout, half open

/// What each member holds, by its number.
std::vector<Range> ranges_of(const Distribution& d) {
  std::vector<Range> ranges(d.members.size());
  std::vector<int64_t> coordinates(d.axis_sizes.size());
  for (size_t i = 0; i < d.members.size(); ++i) {
    auto rest = static_cast<int64_t>(i);
    for (size_t a = d.axis_sizes.size(); a-- > 0; rest /= d.axis_sizes[a]) coordinates[a] = rest % d.axis_sizes[a];
    const auto s = local_segments(d.axis_sizes, d.placements, coordinates);
    ranges[static_cast<size_t>(d.members[i])] = {segment_begin(*d.layout, s.first),
                                                 segment_begin(*d.layout, s.first + s.count)};
  }
  return ranges;
}

/// Members that hold the same range, ascending.
using Holders = std::map<Range, std::vector<int64_t>>;

Holders holders_of(const std::vector<Range>& ranges) {
  Holders holders;
  for (size_t i = 0; i < ranges.size(); ++i) holders[ranges[i]].push_back(static_cast<int64_t>(i));
  return holders;
}

/// Of the members that hold a range, the one that `receiver` takes it from: itself, or the holders in turn.
int64_t sender_for(const std::vector<int64_t>& holders, int64_t receiver) {
  const auto it = std::lower_bound(holders.begin(), holders.end(), receiver);
  if (it != holders.end() && *it == receiver) return receiver;
  const auto turn = receiver - (it - holders.begin());  // among those that do not hold it
  return holders[static_cast<size_t>(turn) % holders.size()];
}

class Planner {
 public:
  Planner(const Distribution& from, const Distribution& to)
      : from_(from), to_(to), sources_(ranges_of(from)), targets_(ranges_of(to)), holders_(holders_of(sources_)) {}

  ExchangePlan plan(int64_t me) const {
    ExchangePlan plan;
    for (int64_t other = 0; other < members(); ++other) {
      int64_t count = 0;
      if (sender_for(holders_.at(source(me)), other) == me)
        count = add(source(me), target(other), plan.sends, plan.sent(), *from_.layout, source(me).first);
      plan.send_counts.push_back(count);
    }
    for (int64_t other = 0; other < members(); ++other) {
      int64_t count = 0;
      if (sender_for(holders_.at(source(other)), me) == other)
        count = add(source(other), target(me), plan.receives, plan.received(), *to_.layout, target(me).first);
      plan.receive_counts.push_back(count);
    }
    return plan;
  }

 private:
  int64_t members() const { return static_cast<int64_t>(sources_.size()); }
  const Range& source(int64_t member) const { return sources_[static_cast<size_t>(member)]; }
  const Range& target(int64_t member) const { return targets_[static_cast<size_t>(member)]; }

  /// Rows that lie in both ranges, as copies to or from the buffer that begins at `begin` of `mine`.
  int64_t add(const Range& source, const Range& target, std::vector<ExchangePlan::Copy>& copies, int64_t packed,
              const GlobalLayout& mine, int64_t begin) const {
    int64_t count = 0;
    for (int64_t t = 0; t < mine.num_tensors(); ++t) {
      const auto there = from_.layout->rows_in(t, source.first, source.second);
      const auto here = to_.layout->rows_in(t, target.first, target.second);
      const auto first = std::max(there.begin, here.begin), last = std::min(there.end, here.end);
      if (first >= last) continue;
      const auto row = mine.row_size(t);
      const auto offset = mine.tensor_to_offset[static_cast<size_t>(t)] + first * row - begin;
      copies.push_back({offset, packed + count, (last - first) * row});
      count += (last - first) * row;
    }
    return count;
  }

  const Distribution &from_, &to_;
  std::vector<Range> sources_, targets_;
  Holders holders_;
};

}  // namespace

int64_t ExchangePlan::sent() const { return std::accumulate(send_counts.begin(), send_counts.end(), int64_t{0}); }
int64_t ExchangePlan::received() const {
  return std::accumulate(receive_counts.begin(), receive_counts.end(), int64_t{0});
}

ExchangePlan plan_exchange(const Distribution& from, const Distribution& to, int64_t member) {
  return Planner(from, to).plan(member);
}

}  // namespace fsdp::detail
