#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include "checkpoint/module_state.h"

namespace fsdp::detail {

/// What any torch::optim optimizer keeps for one parameter, taken from the archives that LibTorch gives it for this.
struct ParameterState {
  std::map<std::string, at::Tensor> rows;     // tensors of the parameter's resting shape
  std::map<std::string, c10::IValue> values;  // everything else: step counts
};

/// Options of the group a parameter is in.
using ParameterOptions = std::map<std::string, c10::IValue>;

/// By the names of the module's entries.
struct OptimizerState {
  std::map<std::string, ParameterState> parameters;  // none for one that was never stepped
  std::map<std::string, ParameterOptions> options;   // one for every parameter of the optimizer
};

/// Shares the optimizer's tensors. ValueError: a parameter that is not of the module. CheckpointError: state that does
/// not go by rows (LBFGS), or an optimizer that cannot tell its state.
OptimizerState read_optimizer(const torch::optim::Optimizer& optimizer, const ModuleState& module);

/// Gives an optimizer this state. Built and checked without touching the optimizer.
class OptimizerLoad {
 public:
  /// CheckpointError: options that differ within a group of this optimizer, or are those of another kind of optimizer.
  OptimizerLoad(torch::optim::Optimizer& optimizer, const ModuleState& module, OptimizerState state);
  /// CheckpointError, with the optimizer as it was, when it does not take the state.
  void commit();

 private:
  torch::optim::Optimizer& optimizer_;
  torch::serialize::InputArchive archive_;
  std::vector<void*> fresh_, loaded_;  // parameters that keep no state, and that get some
};

}  // namespace fsdp::detail
