#include "checkpoint/restore.h"

#include <algorithm>
#include <set>
#include <tuple>

#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/module_state.h"
#include "checkpoint/optimizer_state.h"

namespace fsdp::detail {
namespace {

std::string optimizer_name(const std::string& name) { return "optimizer/" + name; }

/// One load on one rank: first everything is matched, then read, and only then applied.
class Restore {
 public:
  Restore(const Stored& stored, ModuleState state, torch::optim::Optimizer* optimizer)
      : stored_(stored), state_(std::move(state)), optimizer_(optimizer), reader_(stored.folder, stored.manifest.id) {
    for (const auto& e : state_.entries)
      for (const auto& name : e.names()) names_.push_back(name);
    if (!optimizer_) return;
    for (const auto& group : optimizer_->param_groups())
      for (const auto& p : group.params()) {
        trained_.push_back(&trained_entry(state_, p));
      }
  }

  const std::vector<std::string>& names() const { return names_; }
  std::vector<std::string> trained_names() const {
    std::vector<std::string> names;
    for (const auto* e : trained_) names.push_back(stored_name(*e));
    return names;
  }

  /// Finds what is stored for each entry. `known` and `known_trained` are the names on all ranks: a rank may have only
  /// a part of the model.
  void match(const std::set<std::string>& known, const std::set<std::string>& known_trained) {
    const auto& m = stored_.manifest;
    for (const auto& e : state_.entries) {
      const auto found = sources(e);
      if (found.empty()) report.missing.push_back(e.name);
      for (const auto& name : found) check_fit(e, name);
    }
    std::set<std::string> reached;
    for (const auto& name : known) reached.insert(m.stored_name(name));
    for (const auto& [name, t] : m.tensors)
      if (!reached.contains(name)) report.unexpected.push_back(name);
    if (!optimizer_) return;
    for (const auto* e : trained_)
      if (!m.optimizer.contains(stored_name(*e))) report.missing.push_back(optimizer_name(e->name));
    for (const auto& [name, p] : m.optimizer) {
      if (!known_trained.contains(name)) report.unexpected.push_back(optimizer_name(name));
      for (const auto& [key, t] : p.rows)
        if (const auto it = m.tensors.find(name); it == m.tensors.end() || it->second.shape != t.shape)
          problems_.push_back(
              fmt::format("the optimizer's '{}' of '{}' is {}, and no parameter is", key, name, t.describe()));
    }
  }

  void throw_problems(bool strict) {
    for (const auto& name : report.missing)
      if (strict) problems_.push_back(fmt::format("'{}': missing in it", name));
    for (const auto& name : report.unexpected)
      if (strict) problems_.push_back(fmt::format("'{}': in it, but not here", name));
    if (!problems_.empty())
      throw CheckpointError(fmt::format("{} does not fit:\n  {}", stored_.name, fmt::join(problems_, "\n  ")));
  }

  void read() {
    for (const auto& e : state_.entries) {
      const auto found = sources(e);
      if (found.empty()) continue;
      auto rows = reader_.read(stored_.manifest.tensors.at(found[0]), e.rows);
      for (size_t i = 1; i < found.size(); ++i)
        if (!same_bytes(rows, reader_.read(stored_.manifest.tensors.at(found[i]), e.rows)))
          throw CheckpointError(
              fmt::format("'{}' and '{}' are one tensor in this module, and have different values in {}", found[0],
                          found[i], stored_.name));
      values_.emplace_back(&e, std::move(rows));
    }
    if (optimizer_) read_optimizer_state();
  }

  void commit_optimizer() {
    if (optimizer_load_) optimizer_load_->commit();
  }

  void undo_optimizer() {
    if (optimizer_load_) optimizer_load_->undo();
  }

  /// match() has found every target fit to be written.
  void commit_module() {
    for (auto& [e, rows] : values_) {
      auto target = e->tensor;
      target.copy_(rows.reshape(target.sizes()));
      if (e->group) e->group->invalidate();
    }
  }

  CheckpointReport report;

 private:
  /// Names in the manifest of what is stored for an entry: several, when tensors that are one here are two there.
  std::vector<std::string> sources(const StateEntry& e) const {
    std::vector<std::string> found;
    for (const auto& name : e.names())
      if (const auto& stored = stored_.manifest.stored_name(name);
          stored_.manifest.tensors.contains(stored) && std::find(found.begin(), found.end(), stored) == found.end())
        found.push_back(stored);
    return found;
  }

  std::string stored_name(const StateEntry& e) const {
    const auto found = sources(e);
    return found.empty() ? e.name : found[0];
  }

  void check_fit(const StateEntry& e, const std::string& name) {
    const auto& there = stored_.manifest.tensors.at(name);
    const StoredTensor here{e.shape, e.tensor.scalar_type(), {}};
    if (at::has_internal_overlap(e.tensor) == at::MemOverlap::Yes ||
        (e.tensor.is_inference() && !c10::InferenceMode::is_enabled()))
      problems_.push_back(
          fmt::format("'{}' cannot be written: its elements share memory, or it was made in inference mode", e.name));
    if (there.dtype == at::ScalarType::Undefined) {
      problems_.push_back(fmt::format("'{}' has a dtype that LibTorch lacks", name));
      return;
    }
    if (there.shape != here.shape || (!stored_.convert && there.dtype != here.dtype))
      problems_.push_back(
          fmt::format("'{}': saved {}, expected {}{}", e.name, there.describe(), here.describe(),
                      there.shape == here.shape ? " (load_safetensors converts, load_checkpoint does not)" : ""));
  }

  void read_optimizer_state() {
    OptimizerState loaded;
    for (const auto* e : trained_) {
      const auto it = stored_.manifest.optimizer.find(stored_name(*e));
      if (it == stored_.manifest.optimizer.end()) continue;
      loaded.options[e->name] = it->second.options;
      if (!it->second.has_state) continue;
      auto& own = loaded.parameters[e->name];
      own.values = it->second.values;
      for (const auto& [key, t] : it->second.rows)
        own.rows[key] = reader_.read(t, e->rows).reshape(e->tensor.sizes()).to(e->tensor.device());
    }
    optimizer_load_.emplace(*optimizer_, state_, std::move(loaded));
  }

  const Stored& stored_;
  ModuleState state_;
  torch::optim::Optimizer* optimizer_;
  PieceReader reader_;
  std::vector<std::string> names_;
  std::vector<const StateEntry*> trained_;
  std::vector<std::string> problems_;
  std::vector<std::pair<const StateEntry*, at::Tensor>> values_;
  std::optional<OptimizerLoad> optimizer_load_;
};

}  // namespace

CheckpointReport restore(CollectiveCall& call, const Stored& stored, torch::nn::Module& module,
                         torch::optim::Optimizer* optimizer, const CheckpointOptions& options) {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  call.require_same(optimizer ? "with an optimizer" : "without an optimizer", "call");
  std::optional<Restore> load;
  call.step([&] { load.emplace(stored, collect_state(module, options.name, Access::kWrite), optimizer); });
  const auto known = call.union_of(load->names());
  const auto known_trained = call.union_of(load->trained_names());
  call.step([&] {
    load->match(known, known_trained);
    load->throw_problems(options.strict);
    load->read();
  });
  try {
    call.step([&] { load->commit_optimizer(); });
  } catch (...) {
    load->undo_optimizer();  // it failed on some rank: on none, then
    throw;
  }
  call.step([&] { load->commit_module(); });
  const auto missing = call.union_of(load->report.missing);
  CheckpointReport report{{missing.begin(), missing.end()}, std::move(load->report.unexpected), stored.manifest.notes};
  if (stored.convert)  // a file's metadata: what is no other name of a tensor is a note
    for (const auto& [key, value] : stored.manifest.aliases)
      if (!known.contains(key)) report.notes.emplace(key, value);
  return report;
}

}  // namespace fsdp::detail
