#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "layout/items.h"

namespace fsdp::detail {

/// Shard sizes for several buffers as a covering problem. Given a plan to beat, every buffer's shard is below that
/// plan's total; tensors too large to be cut only once in such a shard are bound: their rows divide the shard of
/// whichever buffer holds them. So the shards of buffers with bound tensors are multiples of few numbers and can be
/// enumerated, and a set of shards is possible only if the bound tensors fit by size into the buffers they divide. What
/// is placed where inside a buffer is not looked at.
class SplitCovering {
 public:
  /// `known`: the total shard of the plan to beat. `steps` bounds the work of all searches together.
  SplitCovering(std::span<const Item> items, int64_t dp_size, int64_t known, int64_t max_buffers, int64_t steps);

  /// False where rows are so many that the enumeration takes too long; padding is small there.
  bool is_tractable() const { return is_tractable_; }
  /// No division has a smaller total for this simple reason: the mean, and the largest row.
  int64_t mean() const { return mean_; }

  struct Solution {
    int64_t total = 0;            // room for unbound tensors included
    std::vector<int64_t> shards;  // of the buffers with bound tensors
    std::vector<std::vector<size_t>> bound_tensors;
  };
  enum class Doubt {
    kFits,  // sets of shards that cannot be judged or reached in time count as possible (a lower bound stays one)
    kOut,   // they are left out (every solution comes with its bound tensors)
  };
  /// The possible set of the smallest total above `more_than` and below `known`.
  std::optional<Solution> smallest(Doubt doubt, int64_t more_than);

 private:
  enum class Answer { kYes, kNo, kUnsure };
  void search(size_t from, int64_t left, int64_t total);
  bool room_by_rows();
  Answer fits();
  Answer fits(size_t kind, size_t left, size_t buffer);

  std::vector<Kind> bound_;  // largest first
  std::vector<int64_t> units_, unit_payloads_;
  std::vector<int64_t> shards_;  // possible, ascending
  int64_t dp_size_, known_, max_buffers_, steps_, mean_ = 0;
  bool is_tractable_ = true;

  // Of one search.
  Doubt doubt_ = Doubt::kFits;
  int64_t more_than_ = 0, steps_here_ = 0;
  std::vector<int64_t> chosen_;
  std::vector<__int128> room_;
  std::vector<std::vector<size_t>> taken_;  // per bound kind and buffer: tensors
  std::optional<Solution> best_;
};

}  // namespace fsdp::detail
