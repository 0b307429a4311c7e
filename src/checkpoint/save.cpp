#include <optional>

#include <fmt/format.h>

#include <fsdp/checkpoint.h>

#include "checkpoint/collective_call.h"
#include "checkpoint/dtypes.h"
#include "checkpoint/folder.h"
#include "checkpoint/module_state.h"
#include "checkpoint/optimizer_state.h"
#include "checkpoint/writers.h"
#include "safetensors/header.h"

namespace fsdp {
namespace detail {
namespace {

/// Rows that this rank writes, and where in the manifest they belong.
struct Item {
  const StateEntry* entry;
  at::Tensor tensor;
  StoredTensor* stored;
};

/// Options, values and whole shapes of what this rank writes; the items get their pieces in write_items().
std::pair<Manifest, std::vector<std::string>> describe(const ModuleState& state, const OptimizerState& optimizer,
                                                       std::vector<Item>& items) {
  Manifest part;
  std::vector<std::string> labels;
  auto add = [&](const StateEntry& e, const at::Tensor& tensor, StoredTensor& stored, std::string label) {
    stored.shape = e.shape;
    stored.dtype = tensor.scalar_type();
    items.push_back({&e, tensor, &stored});
    labels.push_back(std::move(label));
  };
  for (const auto& e : state.entries) {
    if (!e.writes) continue;
    add(e, e.tensor, part.tensors[e.name], "module/" + e.name);
    for (const auto& alias : e.aliases) part.aliases[alias] = e.name;
    const auto options = optimizer.options.find(e.name);
    if (options == optimizer.options.end()) continue;
    auto& parameter = part.optimizer[e.name];
    parameter.options = options->second;
    const auto own = optimizer.parameters.find(e.name);
    if (own == optimizer.parameters.end()) continue;
    parameter.has_state = true;
    parameter.values = own->second.values;
    for (const auto& [key, rows] : own->second.rows)
      add(e, rows, parameter.rows[key], fmt::format("optimizer/{}/{}", key, e.name));
  }
  return {std::move(part), std::move(labels)};
}

/// One safetensors file with all items.
void write_items(const std::filesystem::path& folder, const std::string& name, const std::vector<Item>& items,
                 const std::vector<std::string>& labels, Manifest& part) {
  std::vector<safetensors::Entry> entries;
  for (size_t i = 0; i < items.size(); ++i) {
    auto shape = items[i].tensor.dim() == 0 ? Shape{1} : items[i].tensor.sizes().vec();
    entries.push_back({labels[i], dtype_name(items[i].tensor.scalar_type(), labels[i]), std::move(shape)});
  }
  const auto header = safetensors::layout(entries, {{kIdKey, part.id}});
  const auto file = File::create(folder / name);
  file.write(header.data(), static_cast<int64_t>(header.size()), 0);
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& item = items[i];
    if (item.entry->rows.begin == item.entry->rows.end) continue;
    const auto rows = item.entry->to_store(item.tensor);
    file.write(rows.const_data_ptr(), static_cast<int64_t>(rows.nbytes()), entries[i].offset);
    item.stored->pieces.push_back({name, item.entry->rows, entries[i].offset});
  }
  file.sync();
  part.files[name] = file.size();
}

/// What other ranks wrote under this rank's names must be what this rank holds.
void compare(const CheckpointFolder& folder, const ModuleState& state, const OptimizerState& optimizer) {
  std::optional<Manifest> manifest;
  PieceReader reader(folder.writing(), folder.id());
  for (const auto& e : state.entries) {
    if (!e.compares) continue;
    if (!manifest) manifest = folder.read_written_manifest();
    reader.require_same(manifest->tensors.at(e.name), e.rows, e.to_store(e.tensor), fmt::format("'{}'", e.name));
    const auto own = optimizer.parameters.find(e.name);
    if (own == optimizer.parameters.end()) continue;
    const auto& stored = manifest->optimizer[e.name].rows;
    for (const auto& [key, rows] : own->second.rows)
      if (const auto it = stored.find(key); it != stored.end())
        reader.require_same(it->second, e.rows, e.to_store(rows),
                            fmt::format("the optimizer's '{}' of '{}'", key, e.name));
  }
}

void save(const std::filesystem::path& dir, torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
          const CheckpointOptions& options) {
  Unhooked unhooked;
  CollectiveCall call(begin_collective(module, options.world), "save_checkpoint");
  std::optional<CheckpointFolder> folder;
  ModuleState state;
  OptimizerState optimizer_state;
  call.step([&] {
    folder.emplace(dir);
    state = collect_state(module, options.name, Access::kRead);
    if (optimizer) optimizer_state = read_optimizer(*optimizer, state);
  });
  call.require_same(folder->path().string(), "path");
  share_out_writing(state, optimizer_state, call);
  call.step([&] {
    if (call.first()) folder->begin(call.size());
  });
  call.step([&] {
    std::vector<Item> items;
    auto [part, labels] = describe(state, optimizer_state, items);
    part.id = folder->id();
    part.world_size = call.size();
    write_items(folder->writing(), CheckpointFolder::data_file(call.rank()), items, labels, part);
    folder->write_part(call.rank(), part);
  });
  call.step([&] {
    if (!call.first()) return;
    Manifest whole;
    whole.id = folder->id();
    whole.world_size = call.size();
    whole.notes = options.notes;
    for (int64_t rank = 0; rank < call.size(); ++rank) whole.add(folder->read_part(rank), fmt::format("rank {}", rank));
    whole.check_complete();
    folder->write_manifest(whole);
  });
  call.step([&] { compare(*folder, state, optimizer_state); });
  call.step([&] {
    if (call.first()) folder->publish(call.size());
  });
}

}  // namespace
}  // namespace detail

void save_checkpoint(const std::filesystem::path& dir, torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                     const CheckpointOptions& options) {
  detail::save(dir, module, &optimizer, options);
}

void save_checkpoint(const std::filesystem::path& dir, torch::nn::Module& module, const CheckpointOptions& options) {
  detail::save(dir, module, nullptr, options);
}

}  // namespace fsdp
