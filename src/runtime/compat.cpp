#include <fsdp/compat.h>

#include <algorithm>

#include <fmt/format.h>

#include <fsdp/hooks.h>

#include "runtime/context_state.h"
#include "runtime/shard_request.h"
#include "runtime/unit.h"

namespace fsdp::compat {
namespace {

/// FSDP2 has no contexts: the units of one model find each other because one thread shards them before any of them
/// runs.
std::shared_ptr<detail::ContextState> implicit_context(c10::Device device) {
  thread_local std::weak_ptr<detail::ContextState> current;
  auto context = current.lock();
  if (!context || context->finalized || context->device != device) {
    context = std::make_shared<detail::ContextState>(device, RuntimePolicy{}, OwnerMap{}, PrefetchOrder::kRegistration);
    context->finalize_at_first_forward = true;
    current = context;
  }
  return context;
}

Placements placements_for(const DeviceMesh& mesh) {
  if (mesh.ndim() == 1) return zero3(0);
  if (mesh.ndim() == 2) return hsdp(0, 1);
  throw ValueError(
      fmt::format("fully_shard: FSDP2 shards over one mesh axis, or replicates over one and shards over another; the "
                  "mesh has {}. Give mesh.sub(...), or use fsdp::fully_shard with placements",
                  mesh.ndim()));
}

void check_ignored(const torch::nn::Module& module, const std::vector<at::Tensor>& ignored) {
  const auto parameters = module.parameters();
  for (size_t i = 0; i < ignored.size(); ++i)
    if (std::none_of(parameters.begin(), parameters.end(), [&](const auto& p) { return p.is_same(ignored[i]); }))
      throw ValueError(fmt::format("fully_shard: ignored_params[{}] is not a parameter of '{}'", i, module.name()));
}

}  // namespace

FsdpModule& fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  const auto placements = placements_for(options.mesh);
  check_ignored(module, options.ignored_params);
  const auto& policy = options.mp_policy;
  detail::ShardRequest request{
      .precision = {.main_params_dtype = std::nullopt,
                    .main_grads_dtype = std::nullopt,
                    .grad_comm_dtype = policy.reduce_dtype,
                    .param_dtype = policy.param_dtype},
      .schedule = {.reshard_after_forward = options.reshard_after_forward.value_or(true)},
      .ignored = options.ignored_params,
      .casts = {.inputs = policy.cast_forward_inputs ? policy.param_dtype : std::nullopt,
                .outputs = policy.output_dtype},
      .root_keeps_weights = !options.reshard_after_forward,
  };
  if ((request.casts.inputs || request.casts.outputs) && !dynamic_cast<const detail::HookSlot*>(&module))
    throw ValueError(
        fmt::format("fully_shard: inputs and outputs of '{}' cannot be cast, since it has no module hooks; declare it "
                    "with FSDP_MODULE, or set cast_forward_inputs to false and no output_dtype",
                    module.name()));
  auto* active = detail::active_context();
  auto context = active ? active->state() : implicit_context(options.mesh.device());
  return detail::shard_module(module, options.mesh, placements, std::move(request), context);
}

}  // namespace fsdp::compat
