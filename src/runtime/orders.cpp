#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>
#include <torch/nn/module.h>

#include "runtime/context_state.h"
#include "runtime/unit.h"

namespace fsdp::detail {
namespace {

struct Found {
  Unit* unit;
  std::string path;  // from the module the search began at
};

/// Units under `module` with no other unit in between, in registration order.
void nearest_units(const torch::nn::Module& module, const std::unordered_map<const torch::nn::Module*, Unit*>& units,
                   const std::string& prefix, std::unordered_set<const torch::nn::Module*>& seen,
                   std::vector<Found>& found) {
  for (const auto& child : module.named_children()) {
    if (!child.value() || !seen.insert(child.value().get()).second) continue;
    const auto path = prefix.empty() ? child.key() : prefix + "." + child.key();
    if (auto it = units.find(child.value().get()); it != units.end())
      found.push_back({it->second, path});
    else
      nearest_units(*child.value(), units, path, seen, found);
  }
}

}  // namespace

/// Forward is a pre-order walk of the unit tree. Backward visits children in reverse, each still after its parent
/// (whose weights it needs first); reductions follow in post-order of that walk, the order in which backward completes
/// units. A unit reachable by two paths counts where it is met first.
void ContextState::compute_orders() {
  std::unordered_map<const torch::nn::Module*, Unit*> units;
  for (auto* unit : registered) units.emplace(unit->module, unit);
  std::unordered_map<Unit*, std::vector<Found>> under;
  std::unordered_set<Unit*> below;
  for (auto* unit : registered) {
    std::unordered_set<const torch::nn::Module*> seen;
    nearest_units(*unit->module, units, "", seen, under[unit]);
    for (const auto& f : under[unit]) below.insert(f.unit);
  }
  roots.clear();
  for (auto* unit : registered) {
    unit->parent = nullptr;
    unit->children.clear();
    unit->root = !below.contains(unit);
    if (unit->root) roots.push_back(unit);
  }

  std::unordered_set<Unit*> visited;
  forward.clear();
  std::function<void(Unit*)> walk = [&](Unit* unit) {
    forward.push_back(unit);
    for (const auto& f : under[unit]) {
      if (!visited.insert(f.unit).second) continue;
      f.unit->parent = unit;
      f.unit->name = unit->name.empty() ? f.path : unit->name + "." + f.path;
      unit->children.push_back(f.unit);
      walk(f.unit);
    }
  };
  for (size_t i = 0; i < roots.size(); ++i) {
    const auto begin = forward.size();
    roots[i]->name.clear();
    walk(roots[i]);
    for (auto k = begin; k < forward.size(); ++k) {
      auto* unit = forward[k];
      unit->label = i == 0 ? unit->name : fmt::format("(root {}){}{}", i, unit->name.empty() ? "" : ".", unit->name);
    }
  }

  backward.clear();
  reduction.clear();
  std::function<void(Unit*)> reverse = [&](Unit* unit) {
    backward.push_back(unit);
    for (auto it = unit->children.rbegin(); it != unit->children.rend(); ++it) reverse(*it);
    if (unit->trainable()) reduction.push_back(unit);
  };
  for (auto it = roots.rbegin(); it != roots.rend(); ++it) reverse(*it);
}

}  // namespace fsdp::detail
