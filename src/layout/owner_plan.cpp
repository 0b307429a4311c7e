#include <fsdp/owner_plan.h>

#include <algorithm>
#include <numeric>
#include <queue>
#include <set>
#include <string>

#include "layout/checked.h"

namespace fsdp {

namespace {

void check_costs(std::span<const int64_t> costs, int64_t dp_size) {
  if (dp_size < 1) throw ValueError("expected at least one rank, got dp_size " + std::to_string(dp_size));
  int64_t total = 0;
  for (size_t i = 0; i < costs.size(); ++i) {
    if (costs[i] < 0)
      throw ValueError("tensor " + std::to_string(i) + ": expected a cost of at least 0, got " +
                       std::to_string(costs[i]));
    if (__builtin_add_overflow(total, costs[i], &total))
      throw ValueError("the costs of the first " + std::to_string(i + 1) +
                       " tensors do not fit in 64 bits in all: use a coarser unit of cost");
  }
}

/// Ranks beyond the number of tensors can only tie with empty ones before them.
int64_t useful_ranks(std::span<const int64_t> costs, int64_t dp_size) {
  return std::min(dp_size, static_cast<int64_t>(costs.size()));
}

/// Each to the rank with the least so far.
int64_t assign_to_least(std::span<const int64_t> costs, std::span<const size_t> order, int64_t ranks,
                        std::vector<int64_t>& owners) {
  using Load = std::pair<int64_t, int64_t>;  // load, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (int64_t r = 0; r < ranks; ++r) least.push({0, r});
  int64_t most = 0;
  for (size_t i : order) {
    const auto [load, rank] = least.top();
    least.pop();
    owners[i] = rank;
    least.push({load + costs[i], rank});
    most = std::max(most, load + costs[i]);
  }
  return most;
}

/// Each to the rank with the most so far that stays within `limit`; false if one fits nowhere.
bool assign_within(int64_t limit, std::span<const int64_t> costs, std::span<const size_t> order, int64_t ranks,
                   std::vector<int64_t>& owners) {
  std::set<std::pair<int64_t, int64_t>> room;  // room, rank
  for (int64_t r = 0; r < ranks; ++r) room.insert({limit, r});
  for (size_t i : order) {
    const auto it = room.lower_bound({costs[i], 0});
    if (it == room.end()) return false;
    const auto [left, rank] = *it;
    owners[i] = rank;
    room.erase(it);
    room.insert({left - costs[i], rank});
  }
  return true;
}

/// Halvings of the search for a limit: the last step is 1/4096 of the first.
constexpr int kLimits = 12;

}  // namespace

int64_t element_cost(const Shape& shape) {
  int64_t n = 1;
  for (int64_t d : shape) {
    if (d < 0) throw ValueError("shape " + detail::shape_text(shape) + " has a negative dimension");
    n = detail::checked_mul(n, d, "tensor size");
  }
  return n;
}

int64_t newton_schulz_cost(const Shape& shape) {
  const int64_t n = element_cost(shape);
  if (shape.size() < 2 || n == 0) return n;
  const int64_t r = std::min(shape[0], n / shape[0]), c = n / r;
  return detail::checked_mul(detail::checked_mul(r, r, "cost"),
                             detail::checked_add(detail::checked_mul(2, c, "cost"), r, "cost"), "cost");
}

std::vector<int64_t> assign_owners(std::span<const int64_t> costs, int64_t dp_size) {
  check_costs(costs, dp_size);
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  const int64_t ranks = useful_ranks(costs, dp_size);
  std::vector<int64_t> owners(costs.size());
  // The least that is known to work, and the largest that is not.
  int64_t high = assign_to_least(costs, order, ranks, owners), low = owner_load_lower_bound(costs, dp_size);
  auto attempt = owners;
  for (int i = 0; i < kLimits && low < high; ++i) {
    const int64_t limit = i == 0 ? low : low + (high - low) / 2;
    if (assign_within(limit, costs, order, ranks, attempt)) {
      owners = attempt;
      high = limit;
    } else {
      low = limit + 1;
    }
  }
  return owners;
}

std::vector<int64_t> assign_owners(std::span<const Shape> shapes, int64_t dp_size, const OwnerCost& cost) {
  std::vector<int64_t> costs;
  for (const auto& s : shapes) costs.push_back(cost(s));
  return assign_owners(costs, dp_size);
}

std::vector<int64_t> owner_loads(std::span<const int64_t> costs, std::span<const int64_t> owners, int64_t dp_size) {
  check_costs(costs, dp_size);
  if (owners.size() != costs.size())
    throw ValueError("expected one owner per tensor (" + std::to_string(costs.size()) + "), got " +
                     std::to_string(owners.size()));
  std::vector<int64_t> loads(static_cast<size_t>(dp_size), 0);
  for (size_t i = 0; i < costs.size(); ++i) {
    if (owners[i] < 0 || owners[i] >= dp_size)
      throw ValueError("tensor " + std::to_string(i) + ": owner " + std::to_string(owners[i]) + " is not one of the " +
                       std::to_string(dp_size) + " ranks");
    loads[owners[i]] += costs[i];
  }
  return loads;
}

int64_t owner_load_lower_bound(std::span<const int64_t> costs, int64_t dp_size) {
  check_costs(costs, dp_size);
  std::vector<int64_t> sorted(costs.begin(), costs.end());
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const int64_t total = std::accumulate(sorted.begin(), sorted.end(), int64_t{0});
  int64_t bound = total / dp_size + (total % dp_size != 0);
  const auto count = static_cast<int64_t>(sorted.size());
  for (int64_t k = 0; k <= (count - 1) / dp_size && count > 0; ++k) {
    // One rank takes at least k + 1 of the costliest k * dp_size + 1, and no less than the cheapest k + 1 of them.
    const auto last = sorted.begin() + k * dp_size + 1;
    bound = std::max(bound, std::accumulate(last - (k + 1), last, int64_t{0}));
  }
  return bound;
}

}  // namespace fsdp
