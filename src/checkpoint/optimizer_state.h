#pragma once

#include <map>
#include <memory>
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

/// The module's entry for a parameter of the optimizer. ValueError if it has none.
const StateEntry& trained_entry(const ModuleState& module, const at::Tensor& parameter);

/// Shares the optimizer's tensors. ValueError: a parameter that is not of the module. CheckpointError: state that does
/// not go by rows (LBFGS), or an optimizer that cannot tell its state.
OptimizerState read_optimizer(const torch::optim::Optimizer& optimizer, const ModuleState& module);

/// Gives an optimizer this state. Built and checked without touching the optimizer.
class OptimizerLoad {
 public:
  /// CheckpointError: options that differ within a group of this optimizer, or are those of another kind of optimizer.
  OptimizerLoad(torch::optim::Optimizer& optimizer, const ModuleState& module, OptimizerState state);
  /// CheckpointError when the optimizer does not take all of the state.
  void commit();
  /// The optimizer as it was before commit().
  void undo();

 private:
  torch::optim::Optimizer& optimizer_;
  torch::serialize::InputArchive archive_;
  std::vector<void*> fresh_;  // parameters that keep no state
  struct Loaded {
    at::Tensor parameter;
    std::string name;
    std::vector<std::string> keys;
  };
  std::vector<Loaded> loaded_;  // parameters that get some
  struct Before;
  std::shared_ptr<const Before> before_;
};

}  // namespace fsdp::detail
