#include "checkpoint/file.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp::detail {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& action) {
  const auto why = std::generic_category().message(errno);
  throw CheckpointError(fmt::format("cannot {} {}: {}", action, path.string(), why));
}

/// The system may move fewer bytes than asked for, and never more than 2 GiB at once.
template <class Move>
void move_all(int64_t bytes, Move&& move) {
  constexpr int64_t kMost = 1 << 30;
  for (int64_t done = 0; done < bytes;) {
    const auto n = move(done, static_cast<size_t>(std::min(bytes - done, kMost)));
    if (n > 0) done += n;
  }
}

}  // namespace

File::File(std::filesystem::path path, int flags, const char* action)
    : path_(std::move(path)), descriptor_(::open(path_.c_str(), flags | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0) fail(path_, action);
}

File File::create(std::filesystem::path path) { return {std::move(path), O_WRONLY | O_CREAT | O_EXCL, "create"}; }
File File::open(std::filesystem::path path) { return {std::move(path), O_RDONLY, "open"}; }
File File::open_to_write(std::filesystem::path path) { return {std::move(path), O_WRONLY, "open"}; }

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

void File::read(void* data, int64_t bytes, int64_t offset) const {
  move_all(bytes, [&](int64_t done, size_t n) {
    const auto got = ::pread(descriptor_, static_cast<char*>(data) + done, n, offset + done);
    if (got < 0 && errno != EINTR) fail(path_, fmt::format("read {} bytes at {} of", bytes, offset));
    if (got == 0)
      throw CheckpointError(fmt::format("{} is cut short: expected {} bytes at {}, it has {} bytes in all",
                                        path_.string(), bytes, offset, size()));
    return got;
  });
}

void File::write(const void* data, int64_t bytes, int64_t offset) const {
  move_all(bytes, [&](int64_t done, size_t n) {
    const auto put = ::pwrite(descriptor_, static_cast<const char*>(data) + done, n, offset + done);
    if (put < 0 && errno != EINTR) fail(path_, fmt::format("write {} bytes at {} of", bytes, offset));
    return put;
  });
}

void File::resize(int64_t bytes) const {
  if (::ftruncate(descriptor_, bytes) != 0) fail(path_, fmt::format("make {} bytes of", bytes));
}

void File::sync() const {
  if (::fsync(descriptor_) != 0) fail(path_, "sync");
}

int64_t File::size() const {
  struct stat s;
  if (::fstat(descriptor_, &s) != 0) fail(path_, "find the size of");
  return static_cast<int64_t>(s.st_size);
}

void sync_folder(const std::filesystem::path& folder) {
  const auto descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail(folder, "open");
  // Some file systems cannot sync a folder; they have nothing to make durable then.
  const bool failed = ::fsync(descriptor) != 0 && errno != EINVAL && errno != ENOTSUP;
  const int why = errno;
  ::close(descriptor);
  errno = why;
  if (failed) fail(folder, "sync");
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  const auto file = File::create(path);
  file.write(text.data(), static_cast<int64_t>(text.size()), 0);
  file.sync();
}

std::string read_text(const std::filesystem::path& path) {
  const auto file = File::open(path);
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(text.data(), static_cast<int64_t>(text.size()), 0);
  return text;
}

}  // namespace fsdp::detail
