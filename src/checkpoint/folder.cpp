#include "checkpoint/folder.h"

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp::detail {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kStarted = "started.json";  // how many ranks write

std::string part_file(int64_t rank) { return fmt::format("rank-{:05}.json", rank); }

Manifest read(const fs::path& path) { return Manifest::from_json(read_text(path), path.string()); }

}  // namespace

CheckpointFolder::CheckpointFolder(fs::path dir) : dir_(std::move(dir)) {
  if (!dir_.has_filename()) dir_ = dir_.parent_path();  // "a/b/"
  if (dir_.empty()) throw ValueError("the checkpoint's path is empty");
  incomplete_ = dir_;
  incomplete_ += ".incomplete";
}

std::string CheckpointFolder::data_file(int64_t rank) { return fmt::format("rank-{:05}.safetensors", rank); }

void CheckpointFolder::begin(int64_t world_size) const {
  if (fs::exists(dir_))
    throw CheckpointError(fmt::format("{} exists; choose another name, or remove it first", dir_.string()));
  fs::remove_all(incomplete_);
  fs::create_directories(incomplete_);
  Manifest started;
  started.world_size = world_size;
  write_text(incomplete_ / kStarted, started.to_json());
}

void CheckpointFolder::write_part(int64_t rank, const Manifest& part) const {
  write_text(incomplete_ / part_file(rank), part.to_json());
}

Manifest CheckpointFolder::read_part(int64_t rank) const { return read(incomplete_ / part_file(rank)); }

void CheckpointFolder::write_manifest(const Manifest& manifest) const {
  write_text(incomplete_ / kManifest, manifest.to_json());
}

Manifest CheckpointFolder::read_written_manifest() const { return read(incomplete_ / kManifest); }

void CheckpointFolder::publish(int64_t world_size) const {
  for (int64_t rank = 0; rank < world_size; ++rank) fs::remove(incomplete_ / part_file(rank));
  fs::remove(incomplete_ / kStarted);
  sync_folder(incomplete_);
  fs::rename(incomplete_, dir_);
  const auto parent = dir_.parent_path();
  sync_folder(parent.empty() ? "." : parent);
}

std::string CheckpointFolder::missing_part() const {
  if (!fs::exists(incomplete_ / kStarted)) return kStarted;
  const auto world_size = read(incomplete_ / kStarted).world_size;
  for (int64_t rank = 0; rank < world_size; ++rank)
    if (!fs::exists(incomplete_ / part_file(rank)))
      return fmt::format("{} of {} ranks' parts: rank {} did not finish {}", part_file(rank), world_size, rank,
                         data_file(rank));
  return kManifest;
}

Manifest CheckpointFolder::open() const {
  if (!fs::exists(dir_)) {
    if (!fs::exists(incomplete_)) throw CheckpointError(fmt::format("there is no checkpoint {}", dir_.string()));
    throw CheckpointError(fmt::format("there is no checkpoint {}; {} is of a save that did not end. Missing: {}",
                                      dir_.string(), incomplete_.string(), missing_part()));
  }
  if (!fs::exists(dir_ / kManifest))
    throw CheckpointError(
        fmt::format("{} has no {}: not a checkpoint, or copied only in part", dir_.string(), kManifest));
  auto manifest = read(dir_ / kManifest);
  manifest.check_complete();
  return manifest;
}

void CheckpointFolder::check_files(const Manifest& manifest) const {
  for (const auto& [name, expected] : manifest.files) {
    const auto path = dir_ / name;
    if (!fs::exists(path))
      throw CheckpointError(fmt::format("{} is missing: removed, or not copied with the rest", path.string()));
    if (const auto size = File::open(path).size(); size != expected)
      throw CheckpointError(
          fmt::format("{} is damaged: it was saved with {} bytes, and has {}", path.string(), expected, size));
  }
}

}  // namespace fsdp::detail
