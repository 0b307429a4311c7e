#include "distributed/shm/segment.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::detail::shm {
namespace {

[[noreturn]] void fail_with(const char* what, int error) {
  throw std::runtime_error(fmt::format("{}: {}", what, std::strerror(error)));
}

size_t aligned(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

size_t slots_offset(int64_t ranks) {
  return aligned(sizeof(SegmentHeader) + static_cast<size_t>(ranks) * sizeof(RankState), 4096);
}

size_t total_bytes(int64_t ranks) { return slots_offset(ranks) + static_cast<size_t>(ranks) * kDepth * kSlotBytes; }

std::array<char, 40> random_nonce() {
  std::array<unsigned char, 16> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) fail_with("getrandom", errno);
  std::array<char, 40> text{};
  for (size_t i = 0; i < bytes.size(); ++i) std::snprintf(text.data() + 2 * i, 3, "%02x", bytes[i]);
  return text;
}

/// Segments mapped in this process by nonce: its ranks must see them at one address, for ThreadSanitizer to follow
/// their order, and to not map the same pages once per rank.
struct Mapped {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Segment>> segments;
};
Mapped& mapped() {
  static auto* all = new Mapped;  // outlives segments that end with static objects
  return *all;
}

}  // namespace

Segment::Segment(int descriptor, int64_t ranks) : bytes_(total_bytes(ranks)), descriptor_(descriptor) {
  void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  if (address == MAP_FAILED) {
    const int error = errno;
    ::close(descriptor);
    fail_with("mapping the shared memory failed", error);
  }
  base_ = static_cast<std::byte*>(address);
}

std::shared_ptr<Segment> Segment::create(int64_t ranks) {
  const int descriptor = memfd_create("fsdp", MFD_CLOEXEC);
  if (descriptor < 0) fail_with("memfd_create", errno);
  // Takes the pages now: later a full memory would be a signal in the middle of a copy.
  if (const int error = posix_fallocate(descriptor, 0, static_cast<off_t>(total_bytes(ranks)))) {
    ::close(descriptor);
    fail_with(fmt::format("no room for {} bytes of shared memory", total_bytes(ranks)).c_str(), error);
  }
  std::shared_ptr<Segment> segment(new Segment(descriptor, ranks));
  auto* header = new (segment->base_) SegmentHeader;
  header->nonce = random_nonce();
  header->ranks = ranks;
  for (int64_t r = 0; r < ranks; ++r) new (segment->states() + r) RankState;
  auto& all = mapped();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.segments, [](const auto& s) { return s.second.expired(); });
  all.segments[header->nonce.data()] = segment;
  return segment;
}

std::string Segment::address() const { return fmt::format("{} {} {}", getpid(), descriptor_, header().nonce.data()); }

std::shared_ptr<Segment> Segment::open(const std::string& address, int64_t ranks) {
  long long pid = 0;
  int descriptor = -1;
  std::array<char, 40> nonce{};
  if (std::sscanf(address.c_str(), "%lld %d %39s", &pid, &descriptor, nonce.data()) != 3)
    throw std::runtime_error(fmt::format("not the address of a shared segment: '{}'", address));
  if (pid == getpid()) {
    auto& all = mapped();
    std::lock_guard lock(all.mutex);
    if (auto found = all.segments.find(nonce.data()); found != all.segments.end())
      if (auto segment = found->second.lock()) return segment;
    throw std::runtime_error("the rank that made the shared segment is gone");
  }
  const auto path = fmt::format("/proc/{}/fd/{}", pid, descriptor);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) fail_with(path.c_str(), errno);
  // A file that is shorter would be a signal at the first look.
  if (lseek(own, 0, SEEK_END) != static_cast<off_t>(total_bytes(ranks))) {
    ::close(own);
    throw std::runtime_error(fmt::format("{} is not the shared segment", path));
  }
  std::shared_ptr<Segment> segment(new Segment(own, ranks));
  segment->close_descriptor();
  if (segment->header().nonce != nonce) throw std::runtime_error(fmt::format("{} is not the shared segment", path));
  return segment;
}

Segment::~Segment() {
  close_descriptor();
  munmap(base_, bytes_);
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

std::byte* Segment::slot(int64_t rank, uint32_t round) const {
  return base_ + slots_offset(ranks()) + (static_cast<size_t>(rank) * kDepth + round % kDepth) * kSlotBytes;
}

void Segment::fail(std::string_view why) noexcept {
  auto& h = header();
  if (uint32_t nobody = 0; h.failed.compare_exchange_strong(nobody, 1)) {
    copy_text(h.failure, why);
    h.described.store(1);
  }
  for (int64_t r = 0; r < ranks(); ++r) {
    wake(state(r).posted);
    wake(state(r).taken);
  }
}

std::string Segment::failure() const {
  return header().described.load() ? header().failure.data() : "another rank failed";
}

void wake(Counter& counter) noexcept {
  if (counter.sleepers.load() == 0) return;
  syscall(SYS_futex, &counter.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void publish(Counter& counter, uint32_t value) noexcept {
  // Sequentially consistent with the sleeper's announcement: either it sees the value or it is seen here.
  counter.value.store(value);
  wake(counter);
}

void copy_text(std::span<char> to, std::string_view from) noexcept {
  const auto n = std::min(from.size(), to.size() - 1);
  std::memcpy(to.data(), from.data(), n);
  to[n] = '\0';
}

uint64_t process_start_time(int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  if (!std::getline(file, text)) return 0;
  // "pid (name) state ...": the name may hold anything, so fields are counted from the last parenthesis.
  const auto end = text.rfind(')');
  if (end == std::string::npos) return 0;
  char state = 'X';
  unsigned long long start = 0;
  if (std::sscanf(text.c_str() + end + 1,
                  " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", &state,
                  &start) != 2)
    return 0;
  return state == 'Z' || state == 'X' || state == 'x' ? 0 : start;
}

}  // namespace fsdp::detail::shm
