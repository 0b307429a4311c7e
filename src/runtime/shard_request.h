#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <fsdp/fully_shard.h>

namespace fsdp::detail {

struct ContextState;

/// What a unit's forward does to the floating point tensors that pass through it.
struct ForwardCasts {
  std::optional<at::ScalarType> inputs, outputs;
};

/// All that can be asked of a new unit, in whichever spelling.
struct ShardRequest {
  MixedPrecisionPolicy precision = {};
  double grad_scale = 1.0;
  SchedulePolicy schedule = {};
  ShardLayout layout = ShardLayout::kPadded;
  ParameterInit init = {};
  std::vector<at::Tensor> ignored = {};  // parameters left to the caller
  ForwardCasts casts = {};
  bool root_keeps_weights = false;  // reshard_after_forward = false where the unit turns out to be a root
};

/// Makes `module` a unit of `context`. Errors as the public fully_shard.
FsdpModule& shard_module(torch::nn::Module& module, const DeviceMesh& mesh, const Placements& placements,
                         ShardRequest request, const std::shared_ptr<ContextState>& context);

}  // namespace fsdp::detail
