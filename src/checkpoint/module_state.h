#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <fsdp/layout.h>

#include "runtime/unit.h"

namespace fsdp::detail {

/// A parameter or buffer of a module, once, under its first name.
struct StateEntry {
  std::string name;
  std::vector<std::string> aliases;  // further names of the same tensor
  at::Tensor tensor;                 // at rest: this rank's rows; or the whole of what no unit owns
  std::shared_ptr<Unit> unit;        // null: no unit owns it
  Group* group = nullptr;
  Shape shape;  // of the whole tensor
  GlobalLayout::Rows rows;
  bool parameter = true;

  /// Of the ranks that hold these rows, the one that writes them.
  bool writes = false;
  /// Other ranks hold and write a tensor of this name: this rank checks that it has the same.
  bool compares = false;

  std::vector<std::string> names() const;
  /// This rank's rows [local_rows, ...] of the entry's tensor, or of another like it (the optimizer's): contiguous, on
  /// the CPU.
  at::Tensor to_store(const at::Tensor& like) const;
};

struct ModuleState {
  std::vector<StateEntry> entries;
  std::unordered_map<const c10::TensorImpl*, size_t> places;  // in entries
  const StateEntry* find(const at::Tensor& tensor) const;
};

using NameMap = std::function<std::string(const std::string& fqn)>;
enum class Access { kRead, kWrite };

/// World of the units under a module, `world` without units. Finalizes contexts that nobody can finalize by hand.
/// Collective.
std::shared_ptr<World> begin_collective(const torch::nn::Module& module, std::shared_ptr<World> world);

/// The module's state, with all units at rest. StateError naming the unit that is not, or (to read) the parameter that
/// has no values yet; ValueError for two tensors of one name.
ModuleState collect_state(torch::nn::Module& module, const NameMap& names, Access access);

}  // namespace fsdp::detail
