#pragma once

#include <filesystem>
#include <string>

#include "checkpoint/manifest.h"

namespace fsdp::detail {

/// The folder of a checkpoint, while it is written (`<dir>.incomplete`) and after that. What says that it is complete,
/// the manifest and then the name, comes last.
class CheckpointFolder {
 public:
  /// ValueError for an empty path.
  explicit CheckpointFolder(std::filesystem::path dir);

  // ---- writing: rank 0, but for write_part
  /// Replaces an incomplete one. CheckpointError when there is a complete one.
  void begin(int64_t world_size) const;
  /// Name of the file for a rank's tensors.
  static std::string data_file(int64_t rank);
  /// What tells this save from all others; rank 0 has chosen it in begin().
  std::string id() const;
  /// After the rank's data is on the disk.
  void write_part(int64_t rank, const Manifest& part) const;
  Manifest read_part(int64_t rank) const;
  void write_manifest(const Manifest& manifest) const;
  Manifest read_written_manifest() const;
  void publish(int64_t world_size) const;
  const std::filesystem::path& writing() const { return incomplete_; }

  // ---- reading
  /// CheckpointError: there is none, or it is incomplete; says which rank's part is missing.
  Manifest open() const;
  /// CheckpointError naming a file that is missing, or has not the size it was written with.
  void check_files(const Manifest& manifest) const;
  const std::filesystem::path& path() const { return dir_; }

 private:
  std::string missing_part() const;

  std::filesystem::path dir_, incomplete_;
};

}  // namespace fsdp::detail
