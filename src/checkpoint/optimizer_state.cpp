#include "checkpoint/optimizer_state.h"

#include <algorithm>

#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/archive_access.h"

namespace fsdp::detail {
namespace {

using torch::serialize::OutputArchive;

std::map<std::string, c10::IValue> contents(OutputArchive& archive) {
  std::map<std::string, c10::IValue> result;
  for (const auto& attribute : module_of(archive).named_attributes(/*recurse=*/false))
    result.emplace(attribute.name, attribute.value);
  return result;
}

std::string key_of(const at::Tensor& parameter) {
  return std::to_string(reinterpret_cast<size_t>(parameter.unsafeGetTensorImpl()));
}

ParameterOptions options_of(const torch::optim::OptimizerParamGroup& group) {
  OutputArchive archive;
  group.options().serialize(archive);
  return contents(archive);
}

ParameterState state_of(const torch::optim::OptimizerParamState& state, const at::Tensor& parameter,
                        const std::string& name) {
  OutputArchive archive;
  state.serialize(archive);
  ParameterState result;
  for (auto& [key, value] : contents(archive)) {
    if (!value.isTensor()) {
      result.values.emplace(key, value);
      continue;
    }
    const auto tensor = value.toTensor();
    if (!tensor.defined()) continue;
    if (tensor.sizes() != parameter.sizes())
      throw CheckpointError(fmt::format(
          "the optimizer's '{}' of '{}' has shape [{}], expected [{}] as the parameter's rows on this rank; an "
          "optimizer whose state does not go by rows cannot be saved for other ranks",
          key, name, fmt::join(tensor.sizes(), ", "), fmt::join(parameter.sizes(), ", ")));
    result.rows.emplace(key, tensor);
  }
  return result;
}

/// The options of a parameter group, as the checkpoint has them for each of its parameters.
ParameterOptions options_for(const torch::optim::OptimizerParamGroup& group, const ModuleState& module,
                             const std::map<std::string, ParameterOptions>& stored) {
  const auto present = options_of(group);
  auto kind = [](const ParameterOptions& options) {
    std::vector<std::string> keys;
    for (const auto& [key, value] : options) keys.push_back(key);
    return fmt::format("{}", fmt::join(keys, ", "));
  };
  const ParameterOptions* chosen = nullptr;
  std::string chosen_by;
  for (const auto& p : group.params()) {
    const auto& name = trained_entry(module, p).name;
    const auto found = stored.find(name);
    if (found == stored.end()) continue;
    if (kind(found->second) != kind(present))
      throw CheckpointError(
          fmt::format("'{}' was saved with another kind of optimizer: its options were {}, those of this one are {}",
                      name, kind(found->second), kind(present)));
    if (chosen && *chosen != found->second)
      throw CheckpointError(fmt::format(
          "'{}' and '{}' are in one group of the optimizer, and were saved with different options; give them groups of "
          "their own",
          chosen_by, name));
    chosen = &found->second;
    chosen_by = name;
  }
  return chosen ? *chosen : present;
}

}  // namespace

const StateEntry& trained_entry(const ModuleState& module, const at::Tensor& parameter) {
  if (const auto* e = module.find(parameter)) return *e;
  throw ValueError(
      fmt::format("the optimizer has a parameter of shape [{}] that the module has not; give the module that it trains",
                  fmt::join(parameter.sizes(), ", ")));
}

OptimizerState read_optimizer(const torch::optim::Optimizer& optimizer, const ModuleState& module) {
  OptimizerState result;
  for (const auto& group : optimizer.param_groups()) {
    const auto options = options_of(group);
    for (const auto& p : group.params()) {
      const auto& name = trained_entry(module, p).name;
      result.options[name] = options;
      if (const auto found = optimizer.state().find(p.unsafeGetTensorImpl()); found != optimizer.state().end())
        result.parameters[name] = state_of(*found->second, p, name);
    }
  }
  return result;
}

// The archive has the form in which torch::optim::Optimizer::save() writes.
OptimizerLoad::OptimizerLoad(torch::optim::Optimizer& optimizer, const ModuleState& module, OptimizerState state)
    : optimizer_(optimizer) {
  OutputArchive archive;
  const auto unit = archive.compilation_unit();
  OutputArchive states(unit), groups(unit);
  groups.write("param_groups/size", at::tensor(static_cast<int64_t>(optimizer.param_groups().size())));
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    OutputArchive out(unit), options(unit);
    out.write("params/size", at::tensor(static_cast<int64_t>(group.params().size())));
    for (size_t i = 0; i < group.params().size(); ++i) {
      const auto& p = group.params()[i];
      const auto& name = trained_entry(module, p).name;
      out.write("params/" + std::to_string(i), c10::IValue(key_of(p)));
      const auto own = state.parameters.find(name);
      if (own == state.parameters.end()) {
        if (state.options.contains(name)) fresh_.push_back(p.unsafeGetTensorImpl());
        continue;
      }
      Loaded loaded{p, name, {}};
      for (const auto& [key, tensor] : own->second.rows) loaded.keys.push_back(key);
      for (const auto& [key, value] : own->second.values) loaded.keys.push_back(key);
      loaded_.push_back(std::move(loaded));
      OutputArchive one(unit);
      for (const auto& [key, tensor] : own->second.rows) one.write(key, tensor, /*is_buffer=*/true);
      for (const auto& [key, value] : own->second.values) one.write(key, value);
      states.write(key_of(p), one);
    }
    for (const auto& [key, value] : options_for(group, module, state.options)) options.write(key, value);
    out.write("options", options);
    groups.write("param_groups/" + std::to_string(g), out);
  }
  archive.write("pytorch_version", c10::IValue("1.5.0"));  // of the form, not of a library
  archive.write("state", states);
  archive.write("param_groups", groups);
  archive_ = reader_of(archive);
}

struct OptimizerLoad::Before {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;  // by group
  std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>> state;
};

void OptimizerLoad::commit() {
  auto before = std::make_shared<Before>();  // shares tensors with the optimizer, which load() only replaces
  for (const auto& group : optimizer_.param_groups()) before->options.push_back(group.options().clone());
  for (const auto& [parameter, state] : optimizer_.state()) before->state.emplace_back(parameter, state->clone());
  before_ = std::move(before);
  try {
    optimizer_.load(archive_);
  } catch (const c10::Error& e) {
    throw CheckpointError(
        fmt::format("the optimizer does not take the saved state; was it saved with another kind? LibTorch says: {}",
                    e.what_without_backtrace()));
  }
  for (const auto& [parameter, name, keys] : loaded_) {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer_.state().end())
      throw CheckpointError("the optimizer's load() did nothing; an optimizer must implement save() and load()");
    const auto taken = state_of(*found->second, parameter, name);
    for (const auto& key : keys)
      if (!taken.rows.contains(key) && !taken.values.contains(key))
        throw CheckpointError(
            fmt::format("the optimizer has no '{}' for '{}'; it was saved with another kind", key, name));
    for (const auto& [key, tensor] : taken.rows)
      if (std::find(keys.begin(), keys.end(), key) == keys.end())
        throw CheckpointError(fmt::format("the optimizer's '{}' of '{}' is not in the checkpoint", key, name));
  }
  for (auto* p : fresh_) optimizer_.state().erase(p);
}

void OptimizerLoad::undo() {
  if (!before_) return;
  for (size_t g = 0; g < before_->options.size(); ++g)
    optimizer_.param_groups()[g].set_options(before_->options[g]->clone());
  optimizer_.state().clear();
  for (const auto& [parameter, state] : before_->state) optimizer_.state()[parameter] = state->clone();
}

}  // namespace fsdp::detail
