#pragma once

#include <cstdint>
#include <optional>

#include <fsdp/error.h>

namespace fsdp {

/// What drives a unit's forward and backward.
enum class ExecutionHooks {
  kAuto,      ///< module hooks where the module is Hooked, operator hooks for everything else that uses its parameters
  kModule,    ///< module hooks only; a use of the parameters outside the module's forward is a StateError
  kOperator,  ///< operator hooks only
  kManual,    ///< the caller calls pre_forward() ... post_backward(); any other use is a StateError
};

/// When one unit's weights are gathered and released. `validate()` (called by fully_shard) throws ValueError.
struct SchedulePolicy {
  /// Units gathered ahead of their use: as many successors as fit in this number of parameter elements.
  /// nullopt: one successor whatever its size; 0: none.
  std::optional<int64_t> forward_prefetch_size = std::nullopt;
  std::optional<int64_t> backward_prefetch_size = std::nullopt;
  ExecutionHooks hooks = ExecutionHooks::kAuto;
  /// Parameter-gradient callbacks that complete the unit's backward; nullopt: one per trainable parameter. For
  /// units that one backward runs through several times (recompute inside recompute).
  std::optional<int64_t> grad_accumulation_count = std::nullopt;
  bool unshard_all_planes_in_backward = false;  ///< MXFP8: gather row-wise planes in backward too
  bool reshard_after_forward = true;            ///< false: weights stay gathered from forward to the end of backward

  void validate() const;
};

}  // namespace fsdp
