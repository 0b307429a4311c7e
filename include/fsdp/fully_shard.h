#pragma once

#include <functional>
#include <memory>
#include <string>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <fsdp/context.h>
#include <fsdp/distributed/device_mesh.h>
#include <fsdp/layout.h>
#include <fsdp/mixed_precision.h>
#include <fsdp/module.h>
#include <fsdp/placement.h>
#include <fsdp/schedule_policy.h>

namespace fsdp {

/// Fills one parameter built on the meta device: gets its FQN relative to the unit and a full tensor in the optimizer's
/// dtype, on every rank, and writes values that do not depend on the rank or the number of ranks.
using ParameterInit = std::function<void(const std::string& fqn, at::Tensor full)>;

/// Makes `module` a unit: shards the parameters under it that no unit owns yet (so children first, then parents), in
/// place. Afterwards `module.parameters()` are this rank's rows, the same handles as before; forward and backward
/// gather and reduce by themselves. Joins the context active on this thread.
///
/// Errors leave the module untouched. ValueError: the module is a unit already, or lies under units of another context;
/// placements, policies or axes that do not fit the mesh or cannot be reached by collectives; grad_scale not positive
/// and finite; a parameter of a dtype that cannot be trained; a container without forward (ModuleList, ModuleDict,
/// ParameterList, ParameterDict) that owns parameters. StateError: no context is active, or it is finalized.
FsdpModule& fully_shard(torch::nn::Module& module, const DeviceMesh& mesh, const Placements& placements,
                        MixedPrecisionPolicy precision = {}, double grad_scale = 1.0, SchedulePolicy schedule = {},
                        ShardLayout layout = ShardLayout::kPadded, ParameterInit init = {});

template <class M>
FsdpModule& fully_shard(const std::shared_ptr<M>& module, const DeviceMesh& mesh, const Placements& placements,
                        MixedPrecisionPolicy precision = {}, double grad_scale = 1.0, SchedulePolicy schedule = {},
                        ShardLayout layout = ShardLayout::kPadded, ParameterInit init = {}) {
  if (!module) throw ValueError("fully_shard: the module is null");
  return fully_shard(static_cast<torch::nn::Module&>(*module), mesh, placements, precision, grad_scale, schedule,
                     layout, std::move(init));
}

template <class M>
FsdpModule& fully_shard(const torch::nn::ModuleHolder<M>& module, const DeviceMesh& mesh, const Placements& placements,
                        MixedPrecisionPolicy precision = {}, double grad_scale = 1.0, SchedulePolicy schedule = {},
                        ShardLayout layout = ShardLayout::kPadded, ParameterInit init = {}) {
  if (module.is_empty()) throw ValueError("fully_shard: the module holder is empty");
  return fully_shard(static_cast<torch::nn::Module&>(*module.ptr()), mesh, placements, precision, grad_scale, schedule,
                     layout, std::move(init));
}

/// The unit of a module, or nullptr.
FsdpModule* get_fsdp_module(const torch::nn::Module& module);

}  // namespace fsdp
