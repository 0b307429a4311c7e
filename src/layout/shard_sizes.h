#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "layout/items.h"

namespace fsdp::detail {

/// The shard sizes that the rules do not exclude at once. A shard holds the mean and the largest unit. A tensor too
/// large for two neighbouring shards is cut at least twice, a whole shard apart, so its unit must divide the shard:
/// small shards must be multiples of many units, larger ones of fewer.
class ShardSizes {
 public:
  ShardSizes(std::span<const Kind> kinds, int64_t dp_size);

  /// Smallest size not excluded that is at least `from`; nullopt when it does not fit in 64 bits. The first of all is
  /// a lower bound for every plan.
  std::optional<int64_t> next(int64_t from) const;

  /// From `from` on, every multiple of `modulus` is a size not excluded.
  struct Progression {
    int64_t modulus, from;
  };
  /// One per distinct set of tensors that must be cut often, the least restrictive last.
  std::vector<Progression> progressions() const;

 private:
  /// A step of the search's staircase: sizes in [from, until) must be multiples of `modulus`.
  struct Step {
    int64_t from, until, modulus;
  };
  std::vector<Step> steps_;  // ascending; steps whose modulus overflows are left out
};

/// Smallest shard that holds a tensor of `size` with at most one cut.
int64_t least_shard_for_one_cut(int64_t size, int64_t unit);

}  // namespace fsdp::detail
