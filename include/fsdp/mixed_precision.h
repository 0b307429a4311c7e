#pragma once

#include <optional>

#include <c10/core/ScalarType.h>

#include <fsdp/error.h>

namespace fsdp {

/// Storage format of compute weights.
enum class ParamFormat { kNative, kMxfp8 };

/// Number formats of one unit. `validate()` (called by fully_shard) throws ValueError for a dtype that is not a
/// real floating point type of at least 16 bits, and for formats this build cannot compute with.
struct MixedPrecisionPolicy {
  /// The optimizer's weights; nullopt: the parameter's own dtype.
  std::optional<at::ScalarType> main_params_dtype = at::kFloat;
  /// The gradients the optimizer reads, and the accumulation over microbatches; nullopt: the parameter's dtype.
  std::optional<at::ScalarType> main_grads_dtype = std::nullopt;
  /// Gradients on the wire; nullopt: the dtype of the gradient at hand.
  std::optional<at::ScalarType> grad_comm_dtype = std::nullopt;
  /// Weights in compute and on the wire; nullopt: the parameter's own dtype.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  ParamFormat param_format = ParamFormat::kNative;

  void validate() const;
};

}  // namespace fsdp
