#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "layout/items.h"

namespace fsdp::detail {

/// Bounds the search by counted work, not by time: every rank gives up at the same point and finds the same plan.
class WorkBudget {
 public:
  explicit WorkBudget(int64_t steps) : left_(steps) {}
  void spend(int64_t steps) { left_ -= steps; }
  int64_t left() const { return left_; }

 private:
  int64_t left_;
};

/// Places the tensors of all kinds (`tensors` of them in the logical list) so that no multiple of `shard` splits a unit
/// and all lie below shard x dp_size (which fits in 64 bits). nullopt when none was found: a proof that there is none
/// only where `is_exact`.
std::optional<PaddedPlan> pack(std::span<const Kind> kinds, size_t tensors, int64_t shard, int64_t dp_size,
                               WorkBudget& budget);

/// As pack, in one order only.
std::optional<PaddedPlan> pack_quickly(std::span<const Kind> kinds, size_t tensors, int64_t shard, int64_t dp_size,
                                       WorkBudget& budget);

/// Whether `pack` tries every order of these tensors.
bool is_exact(std::span<const Kind> kinds);

}  // namespace fsdp::detail
