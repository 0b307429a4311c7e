#include "checkpoint/folder.h"

#include <random>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp::detail {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kStarted = "started.json";  // how many ranks write

std::string part_file(int64_t rank) { return fmt::format("rank-{:05}.json", rank); }

/// No two saves have the same.
std::string fresh_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}", random(), random(), random());
}

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
  // Not remove_all(): a program that links libtorch.so gets that library's copy of it, which jumps to nowhere.
  if (fs::exists(incomplete_))
    for (const auto& entry : fs::directory_iterator(incomplete_)) fs::remove(entry.path());
  fs::create_directories(incomplete_);
  Manifest started;
  started.id = fresh_id();
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

std::string CheckpointFolder::id() const { return read(incomplete_ / kStarted).id; }

Manifest CheckpointFolder::read_written_manifest() const { return read(incomplete_ / kManifest); }

void CheckpointFolder::publish(int64_t world_size) const {
  sync_folder(incomplete_);
  fs::rename(incomplete_, dir_);
  const auto parent = dir_.parent_path();
  sync_folder(parent.empty() ? "." : parent);
  // The parts are in the manifest; left behind, they would do no harm.
  for (int64_t rank = 0; rank < world_size; ++rank) fs::remove(dir_ / part_file(rank));
  fs::remove(dir_ / kStarted);
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
  manifest.check_pieces((dir_ / kManifest).string());
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
