#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <fsdp/distributed/device_mesh.h>
#include <fsdp/module.h>

/// `fully_shard` as PyTorch's FSDP2 spells it, for programs that are carried over from Python.
namespace fsdp::compat {

/// FSDP2's policy. Sharded parameters keep their own dtype, and gradients are handed to the optimizer in it.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype = std::nullopt;   ///< compute and all-gather; nullopt: the parameter's own
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;  ///< gradient reduction; nullopt: param_dtype
  std::optional<at::ScalarType> output_dtype =
      std::nullopt;  ///< floating point outputs of the module's forward are cast to it
  /// Floating point inputs of the module's forward are cast to param_dtype: tensors, and tensors in std::optional and
  /// std::vector; those in other types of argument are not.
  bool cast_forward_inputs = true;
};

struct FullyShardOptions {
  /// One axis: sharded (ZeRO-3). Two: replicated on the first, sharded on the second (HSDP).
  DeviceMesh mesh;
  /// nullopt: true, except for the root.
  std::optional<bool> reshard_after_forward = std::nullopt;
  MixedPrecisionPolicy mp_policy = {};
  /// Left alone: not sharded, not gathered, their gradients not reduced.
  std::vector<at::Tensor> ignored_params = {};
};

/// Makes `module` a unit, as fsdp::fully_shard does and with its errors. Joins the context active on this thread;
/// without one, the units that a thread shards before their first forward share a context of their own, which that
/// forward finalizes (collective, so on all ranks alike). ValueError also for a mesh of other than one or two axes; for
/// casts of inputs or outputs asked of a module that is not Hooked (declare it with FSDP_MODULE, or set
/// cast_forward_inputs to false); for an ignored tensor that is not a parameter under `module`.
FsdpModule& fully_shard(torch::nn::Module& module, const FullyShardOptions& options);

template <class M>
FsdpModule& fully_shard(const std::shared_ptr<M>& module, const FullyShardOptions& options) {
  if (!module) throw ValueError("fully_shard: the module is null");
  return fully_shard(static_cast<torch::nn::Module&>(*module), options);
}

template <class M>
FsdpModule& fully_shard(const torch::nn::ModuleHolder<M>& module, const FullyShardOptions& options) {
  if (module.is_empty()) throw ValueError("fully_shard: the module holder is empty");
  return fully_shard(static_cast<torch::nn::Module&>(*module.ptr()), options);
}

}  // namespace fsdp::compat
