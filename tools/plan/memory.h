#pragma once

#include <cstdint>
#include <string>

#include "plan/plan.h"

namespace fsdp::plan {

/// Bytes that one rank holds between steps.
struct AtRest {
  int64_t main_weights = 0;   ///< the optimizer's
  int64_t model_weights = 0;  ///< for compute; may share memory with main_weights
  int64_t weights = 0;        ///< both, shared memory counted once
  int64_t gradients = 0;
  int64_t optimizer_state = 0;  ///< of the rows of tensors, without padding

  /// What fsdp::ParameterGroup::persistent_bytes() adds up to.
  int64_t library() const { return weights + gradients; }
  int64_t total() const { return library() + optimizer_state; }
};

AtRest at_rest(const Plan&, int64_t rank);
/// The rank that holds most at rest, the lowest among equals.
int64_t largest_rank(const Plan&);

/// Bytes that a step needs beyond those at rest, by what they are.
struct Transient {
  int64_t weights = 0;       ///< full weights of units, gathered
  int64_t packed = 0;        ///< gradients of a unit, packed for their reduction
  int64_t accumulators = 0;  ///< gradients that wait for the last microbatch
  int64_t gradients = 0;     ///< full gradients as autograd leaves them on the parameters

  /// What the library allocates: FsdpContext::transient_memory().
  int64_t library() const { return weights + packed + accumulators; }
  int64_t total() const { return library() + gradients; }
};

struct Peak {
  Transient at;               ///< when the total is largest
  std::string where;          ///< "backward of block 31"
  int64_t library_bytes = 0;  ///< most of what the library allocates, at whatever moment
};

/// Walks through a step as the runtime does: one unit gathered ahead, one reduction under way, the weights of a unit
/// released before its gradients are packed. Activations are the model's own and not counted.
Peak transient_peak(const Plan&, int64_t rank);

}  // namespace fsdp::plan
