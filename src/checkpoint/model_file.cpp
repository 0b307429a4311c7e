#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include <fsdp/checkpoint.h>

#include "checkpoint/dtypes.h"
#include "checkpoint/file.h"
#include "checkpoint/module_state.h"
#include "checkpoint/restore.h"
#include "checkpoint/writers.h"
#include "safetensors/header.h"

namespace fsdp {
namespace detail {
namespace {

namespace fs = std::filesystem;

/// Names, shapes and dtypes of the whole model, of which a rank may have only a part. Collective.
Manifest whole_model(const ModuleState& state, CollectiveCall& call) {
  Manifest mine;
  for (const auto& e : state.entries) {
    mine.tensors[e.name] = {e.shape, e.tensor.scalar_type(), {}};
    for (const auto& alias : e.aliases) mine.aliases[alias] = e.name;
  }
  std::string text;
  call.step([&] { text = mine.to_json(); });
  const auto lists = call.exchange({text});
  Manifest whole;
  call.step([&] {
    int64_t rank = 0;
    for (const auto& list : lists)
      whole.add(Manifest::from_json(list[0], "a rank's list of tensors"), fmt::format("rank {}", rank++));
    whole.check_names();
  });
  return whole;
}

std::vector<fs::path> model_files(const fs::path& path) {
  if (!fs::exists(path)) throw CheckpointError(fmt::format("there is no {}", path.string()));
  if (!fs::is_directory(path)) return {path};
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(path))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  if (files.empty()) throw CheckpointError(fmt::format("{} has no *.safetensors files", path.string()));
  std::sort(files.begin(), files.end());
  return files;
}

Stored open_model(const fs::path& path) {
  Stored stored;
  stored.name = path.string();
  stored.convert = true;
  auto& m = stored.manifest;
  safetensors::Metadata metadata;
  for (const auto& file : model_files(path)) {
    stored.folder = file.parent_path();
    const auto header = safetensors::read_header(file);
    safetensors::check_tensors(header, file);
    metadata.insert(metadata.end(), header.metadata.begin(), header.metadata.end());
    for (const auto& e : header.entries) {
      StoredTensor t{e.shape, dtype_named(e.dtype), {}};
      if (e.bytes > 0) t.pieces.push_back({file.filename().string(), {0, t.rows()}, e.offset});
      if (!m.tensors.emplace(e.name, std::move(t)).second)
        throw CheckpointError(fmt::format("{}: tensor '{}' is in it twice", path.string(), e.name));
    }
  }
  for (const auto& [key, value] : metadata)
    (m.tensors.contains(value) && !m.tensors.contains(key) ? m.aliases : m.notes)[key] = value;
  return stored;
}

void save(const fs::path& path, torch::nn::Module& module, const CheckpointOptions& options) {
  Unhooked unhooked;
  CollectiveCall call(begin_collective(module, options.world), "save_safetensors");
  ModuleState state;
  call.step([&] {
    if (!path.has_filename()) throw ValueError(fmt::format("'{}' is not the name of a file", path.string()));
    state = collect_state(module, options.name, Access::kRead);
  });
  call.require_same(path.string(), "path");
  share_out_writing(state, {}, call);
  const auto model = whole_model(state, call);
  auto incomplete = path;
  incomplete += ".incomplete";

  std::vector<safetensors::Entry> entries;
  std::map<std::string, const safetensors::Entry*> entry_of;
  call.step([&] {
    for (const auto& [name, t] : model.tensors) entries.push_back({name, dtype_name(t.dtype, name), t.shape});
    for (const auto& e : entries) entry_of[e.name] = &e;
    for (const auto& [key, value] : options.notes)
      if (model.find(key))
        throw ValueError(fmt::format("note '{}' has the name of a tensor; such notes do not come back", key));
    safetensors::Metadata metadata(options.notes.begin(), options.notes.end());
    metadata.insert(metadata.end(), model.aliases.begin(), model.aliases.end());
    const auto header = safetensors::layout(entries, metadata);
    if (!call.first()) return;
    if (const auto folder = path.parent_path(); !folder.empty()) fs::create_directories(folder);
    fs::remove(incomplete);
    const auto file = File::create(incomplete);
    file.write(header.data(), static_cast<int64_t>(header.size()), 0);
    int64_t bytes = static_cast<int64_t>(header.size());
    for (const auto& e : entries) bytes += e.bytes;
    file.resize(bytes);
  });
  auto place = [&](const StateEntry& e) {
    const auto& t = model.tensors.at(e.name);
    return StoredTensor{
        t.shape, t.dtype, {{incomplete.filename().string(), {0, t.rows()}, entry_of.at(e.name)->offset}}};
  };
  call.step([&] {
    const auto file = File::open_to_write(incomplete);
    for (const auto& e : state.entries) {
      if (!e.writes || e.rows.begin == e.rows.end) continue;
      const auto rows = e.to_store(e.tensor);
      const auto whole = place(e);
      file.write(rows.const_data_ptr(), static_cast<int64_t>(rows.nbytes()),
                 whole.pieces[0].offset + e.rows.begin * whole.row_bytes());
    }
    file.sync();
  });
  call.step([&] {
    PieceReader reader(incomplete.parent_path());
    for (const auto& e : state.entries)
      if (e.compares) reader.require_same(place(e), e.rows, e.to_store(e.tensor), fmt::format("'{}'", e.name));
  });
  call.step([&] {
    if (!call.first()) return;
    fs::rename(incomplete, path);
    const auto folder = path.parent_path();
    sync_folder(folder.empty() ? "." : folder);
  });
}

}  // namespace
}  // namespace detail

void save_safetensors(const std::filesystem::path& path, torch::nn::Module& module, const CheckpointOptions& options) {
  detail::save(path, module, options);
}

CheckpointReport load_safetensors(const std::filesystem::path& path, torch::nn::Module& module,
                                  const CheckpointOptions& options) {
  detail::CollectiveCall call(detail::begin_collective(module, options.world), "load_safetensors");
  detail::Stored stored;
  call.step([&] { stored = detail::open_model(path); });
  call.require_same(stored.name, "path");
  return detail::restore(call, stored, module, nullptr, options);
}

}  // namespace fsdp
