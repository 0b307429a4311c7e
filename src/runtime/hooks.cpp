#include <fsdp/hooks.h>

#include <fmt/format.h>

#include <fsdp/fully_shard.h>

#include "runtime/registry.h"
#include "runtime/unit.h"

namespace fsdp::detail {

ForwardGuard::ForwardGuard(std::shared_ptr<FsdpModule> unit) : unit_(std::move(unit)) {
  auto& u = unit_of(*unit_);
  driven_ = u.schedule.hooks == ExecutionHooks::kAuto || u.schedule.hooks == ExecutionHooks::kModule;
  if (driven_) {
    u.input_hooks = 0;
    u.begin_forward(false);
  }
}

ForwardGuard::~ForwardGuard() {
  if (driven_ && !finished_) unit_of(*unit_).abort_forward(false);
}

namespace {
void cast(at::Tensor& tensor, const std::optional<at::ScalarType>& type) {
  if (type && tensor.is_floating_point()) tensor = tensor.to(*type);
}
}  // namespace

void ForwardGuard::input(at::Tensor& tensor) {
  if (!driven_) return;
  auto& unit = unit_of(*unit_);
  cast(tensor, unit.casts.inputs);
  unit.hook_input(tensor);
}

void ForwardGuard::output(at::Tensor& tensor) {
  if (!driven_) return;
  auto& unit = unit_of(*unit_);
  cast(tensor, unit.casts.outputs);
  if (unit.hook_output(tensor)) unit.armed = true;
}

void ForwardGuard::finish() {
  if (!driven_) return;
  finished_ = true;
  unit_of(*unit_).end_forward(false);
}

namespace {

/// The first unit in a module tree that owns parameters.
FsdpModule* sharded_part(const torch::nn::Module& module) {
  if (auto* unit = get_fsdp_module(module); unit && !unit->parameter_groups().empty()) return unit;
  for (const auto& child : module.children())
    if (auto* unit = sharded_part(*child)) return unit;
  return nullptr;
}

void refuse(const torch::nn::Module& module, const char* call, const char* why, const char* instead) {
  if (const auto* unit = sharded_part(module))
    throw StateError(fmt::format("{} of '{}', which holds the sharded unit '{}', {}: {}", call, module.name(),
                                 unit_of(*unit).display_name(), why, instead));
}

}  // namespace

void refuse_save(const torch::nn::Module& module) {
  refuse(module, "torch::save", "would write this rank's shards only",
         "save inside fsdp::FullParameters from one rank, parameter by parameter");
}

void refuse_load(const torch::nn::Module& module) {
  refuse(
      module, "torch::load", "would replace the shards",
      "load before fully_shard, or copy into the parameters inside fsdp::FullParameters(module, /*write_back=*/true)");
}

void refuse_clone(const torch::nn::Module& module) {
  refuse(module, "clone", "would copy shards without the state that trains them", "clone before fully_shard");
}

}  // namespace fsdp::detail
