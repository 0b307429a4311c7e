#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <fsdp/layout.h>
#include <fsdp/placement.h>

namespace fsdp::detail {

/// Where tensors lie: which part of which layout each member of a mesh holds.
struct Distribution {
  const GlobalLayout* layout;
  std::span<const int64_t> axis_sizes;  // outer to inner
  std::span<const Placement> placements;
  std::span<const int64_t> members;  // row-major over the axes: the number of each in the exchange, 0 to n - 1
};

/// What one member sends and receives so that tensors get from one distribution to another. Between two members rows
/// travel in the order of tensors; nothing else does, so counts are exact.
struct ExchangePlan {
  struct Copy {
    int64_t local;   // first element in this member's buffer
    int64_t packed;  // ... in what is sent, or received
    int64_t elements;
  };
  std::vector<int64_t> send_counts, receive_counts;  // elements, by member
  std::vector<Copy> sends, receives;

  int64_t sent() const;
  int64_t received() const;
};

/// Both have the same members and tensors, and no partial sums. A member takes what it holds from itself; what several
/// others hold, it takes from one of them, and those share the work. Every member computes what fits the others' plans.
ExchangePlan plan_exchange(const Distribution& from, const Distribution& to, int64_t member);

}  // namespace fsdp::detail
