#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/figures.h"

namespace fsdp::plan {

/// A strategy on a mesh, and what its largest rank needs.
struct Choice {
  std::string strategy;
  Mesh mesh;
  int64_t bytes = 0;  ///< at rest and transient
  int64_t sent = 0;   ///< per step, by the largest rank
  int64_t outer = 0;  ///< of it, over the outer of two axes
};

struct Fit {
  int64_t memory = 0;  ///< bytes of one GPU that weights, gradients and optimizer may take
  Choice asked;
  bool fits() const { return asked.bytes <= memory; }
  /// Every named strategy on as many ranks, from what sends least to what sends most.
  std::vector<Choice> same_ranks;
  /// The first of same_ranks that fits.
  std::optional<Choice> best;
  /// zero3 on the fewest ranks, doubling from those asked for up to 2^20, on which it fits; only if nothing fits above.
  std::optional<Choice> more_ranks;
};

/// Tries the strategies with the options' precision, layout and schedule. `strategy` is the text the options came from.
/// ValueError for memory that is not positive.
Fit fit(const Model&, const Options&, const std::string& strategy, int64_t memory);

}  // namespace fsdp::plan
