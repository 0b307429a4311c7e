#include "checkpoint/module_state.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include <fmt/format.h>

#include "runtime/registry.h"

namespace fsdp::detail {
namespace {

/// Ranks along the replicated axes hold the same rows: they take turns, so that each writes its part.
bool takes_turn(const Group& group, size_t turn) {
  size_t replica = 0, replicas = 1;
  const auto& placements = group.main_weight().placements();
  for (size_t i = 0; i < placements.size(); ++i) {
    if (is_sharded(placements[i])) continue;
    const auto axis = static_cast<int64_t>(i);
    const auto size = static_cast<size_t>(group.mesh().size(axis));
    replica = replica * size + static_cast<size_t>(group.mesh().local_rank(axis));
    replicas *= size;
  }
  return turn % replicas == replica;
}

/// The lowest of the ranks that hold the tensor with this one; nothing where this one holds it alone.
std::string party_of(const StateEntry& e) {
  if (!e.unit) return "";
  const auto ranks = e.unit->mesh->world_ranks();
  return std::to_string(*std::min_element(ranks.begin(), ranks.end()));
}

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
  return (t.dim() == 0 ? t.reshape({1}) : t).cpu().contiguous();
}

const StateEntry* ModuleState::find(const at::Tensor& tensor) const {
  const auto it = std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.tensor.is_same(tensor); });
  return it == entries.end() ? nullptr : &*it;
}

std::shared_ptr<World> world_of(const torch::nn::Module& module) {
  for (const auto& p : module.parameters())
    if (const auto unit = registry::owner(p.unsafeGetTensorImpl())) return unit->mesh->world().shared_from_this();
  return nullptr;
}

ModuleState collect_state(torch::nn::Module& module, const NameMap& names, Access access) {
  ModuleState state;
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  std::map<std::string, std::string> fqn_of;  // by name
  std::vector<std::shared_ptr<Unit>> units;
  auto add = [&](const std::string& fqn, const at::Tensor& tensor, bool parameter) {
    if (!tensor.defined()) return;
    auto name = names ? names(fqn) : fqn;
    if (const auto [other, fresh] = fqn_of.emplace(name, fqn); !fresh)
      throw ValueError(fmt::format("'{}' and '{}' are both called '{}'; CheckpointOptions::name must tell them apart",
                                   other->second, fqn, name));
    const auto [it, fresh] = seen.emplace(tensor.unsafeGetTensorImpl(), state.entries.size());
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

void share_out_writing(ModuleState& state, CollectiveCall& call) {
  // Ranks that hold one tensor together, as the shards of a unit or alone, form a party. Where several parties have a
  // tensor of one name (tensor parallelism that replicates it; or a program in which names are not unique), the party
  // with the lowest rank writes, and the others compare.
  // A tensor that no unit owns is a party of each rank's own.
  std::vector<std::string> mine;
  for (const auto& e : state.entries) mine.push_back(party_of(e) + ' ' + e.name);
  std::map<std::string, int64_t> writer;
  int64_t rank = 0;
  for (const auto& list : call.exchange(mine)) {
    for (const auto& line : list) {
      const auto space = line.find(' ');
      const auto party = line.substr(0, space);
      const auto lowest = party.empty() ? rank : std::stoll(party);
      const auto [it, fresh] = writer.emplace(line.substr(space + 1), lowest);
      if (!fresh) it->second = std::min<int64_t>(it->second, lowest);
    }
    ++rank;
  }
  for (auto& e : state.entries) {
    const auto party = party_of(e);
    const bool party_writes = (party.empty() ? call.rank() : std::stoll(party)) == writer.at(e.name);
    const bool turn = !e.unit || takes_turn(*e.group, e.unit->find(e.tensor.unsafeGetTensorImpl()).index);
    e.writes = party_writes && turn;
    e.compares = !party_writes && turn && e.parameter;
  }
}

}  // namespace fsdp::detail
