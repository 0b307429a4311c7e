#include "checkpoint/module_state.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "runtime/registry.h"

namespace fsdp::detail {
namespace {

void bring_to_rest(Unit& unit, Access access) {
  auto& context = *unit.context_state;
  context.require_finalized("it");
  context.end_operator_forwards(nullptr);
  const auto& name = unit.display_name();
  if (unit.phase() != FsdpModule::Phase::kResting)
    throw StateError(
        fmt::format("unit '{}' is in phase {}; call it between forward and backward", name, to_string(unit.phase())));
  unit.release();
  for (const auto& group : unit.groups) {
    if (group->shows_full_main())
      throw StateError(fmt::format("unit '{}' shows its FullParameters; leave their scope first", name));
    if (group->is_unsharded())
      throw StateError(fmt::format("unit '{}' was unsharded by hand; reshard() it first", name));
    group->check_handles(name);
    if (access == Access::kRead) group->check_values(name);
  }
}

}  // namespace

std::vector<std::string> StateEntry::names() const {
  std::vector<std::string> all{name};
  all.insert(all.end(), aliases.begin(), aliases.end());
  return all;
}

at::Tensor StateEntry::to_store(const at::Tensor& like) const {
  const auto t = like.detach();
  return (t.dim() == 0 ? t.reshape({1}) : t).cpu().resolve_conj().resolve_neg().contiguous();
}

const StateEntry* ModuleState::find(const at::Tensor& tensor) const {
  const auto it = places.find(tensor.unsafeGetTensorImpl());
  return it == places.end() ? nullptr : &entries[it->second];
}

std::shared_ptr<World> begin_collective(const torch::nn::Module& module, std::shared_ptr<World> world) {
  for (const auto& p : module.parameters())
    if (const auto unit = registry::owner(p.unsafeGetTensorImpl())) {
      auto& context = *unit->context_state;
      if (context.finalize_at_first_forward && !context.finalized) context.finalize();
      world = unit->mesh->world().shared_from_this();
    }
  return world;
}

ModuleState collect_state(torch::nn::Module& module, const NameMap& names, Access access) {
  ModuleState state;
  std::map<std::string, std::string> fqn_of;  // by name
  std::vector<std::shared_ptr<Unit>> units;
  auto add = [&](const std::string& fqn, const at::Tensor& tensor, bool parameter) {
    if (!tensor.defined()) return;
    auto name = names ? names(fqn) : fqn;
    if (const auto [other, fresh] = fqn_of.emplace(name, fqn); !fresh)
      throw ValueError(fmt::format("'{}' and '{}' are both called '{}'; CheckpointOptions::name must tell them apart",
                                   other->second, fqn, name));
    const auto [it, fresh] = state.places.emplace(tensor.unsafeGetTensorImpl(), state.entries.size());
    if (!fresh) {
      state.entries[it->second].aliases.push_back(std::move(name));
      return;
    }
    StateEntry e;
    e.name = std::move(name);
    e.tensor = tensor;
    e.parameter = parameter;
    e.unit = registry::owner(tensor.unsafeGetTensorImpl());
    if (e.unit) {
      const auto place = e.unit->find(tensor.unsafeGetTensorImpl());
      e.group = place.group;
      e.shape = place.group->shapes()[place.index].sizes;
      e.rows = place.group->main_weight().local_rows(static_cast<int64_t>(place.index));
      if (std::find(units.begin(), units.end(), e.unit) == units.end()) units.push_back(e.unit);
    } else {
      if (tensor.is_meta())
        throw StateError(fmt::format("'{}' is on the meta device, and no unit owns it; give it values first", fqn));
      e.shape = tensor.sizes().vec();
      e.rows = {0, tensor.dim() == 0 ? 1 : tensor.size(0)};
    }
    state.entries.push_back(std::move(e));
  };
  for (const auto& p : module.named_parameters()) add(p.key(), p.value(), true);
  for (const auto& b : module.named_buffers()) add(b.key(), b.value(), false);
  for (const auto& unit : units) bring_to_rest(*unit, access);
  return state;
}

}  // namespace fsdp::detail
