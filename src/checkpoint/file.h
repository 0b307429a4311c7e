#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace fsdp::detail {

/// One open file. Every failure is a CheckpointError that names the file, what was done, and the system's reason.
class File {
 public:
  static File create(std::filesystem::path path);  // there must be none of this name
  static File open(std::filesystem::path path);    // to read
  static File open_to_write(std::filesystem::path path);
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  File(const File&) = delete;

  /// All of `bytes`, or an error.
  void read(void* data, int64_t bytes, int64_t offset) const;
  void write(const void* data, int64_t bytes, int64_t offset) const;
  /// Sets the size; new bytes are zero.
  void resize(int64_t bytes) const;
  /// Until the bytes are on the disk, and not only in the system's memory.
  void sync() const;
  int64_t size() const;
  const std::filesystem::path& path() const { return path_; }

 private:
  File(std::filesystem::path path, int flags, const char* action);

  std::filesystem::path path_;
  int descriptor_;
};

/// Makes the names in a folder durable.
void sync_folder(const std::filesystem::path& folder);

/// A new file with this text, on the disk.
void write_text(const std::filesystem::path& path, std::string_view text);
std::string read_text(const std::filesystem::path& path);

}  // namespace fsdp::detail
