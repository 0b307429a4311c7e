#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <sched.h>

namespace fsdp::detail::shm {

// The memory that the ranks of one communicator share: a header, one RankState per rank, and kDepth slots per rank.
// Atomics in it are used by several processes: all are lock-free, and none is destroyed.

constexpr size_t kSlotBytes = 256 * 1024;
/// Two slots per rank: one is filled while the other is read.
constexpr uint32_t kDepth = 2;
constexpr size_t kLine = 128;  // two cache lines: the prefetcher fetches them in pairs

/// A counter of rounds that other ranks wait for, and how many of them sleep on it.
struct Counter {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

/// What a rank runs, for the error of ranks that disagree.
using Note = std::array<char, 192>;

/// What agrees on all ranks in a round, next to the counter that says it is there: one cache miss for both.
struct RoundHead {
  uint64_t tag = 0;
  uint32_t rounds = 0;  // of the operation, as this rank counts
};

struct RankState {
  alignas(kLine) Counter posted;  // rounds whose slot this rank has filled
  std::array<RoundHead, kDepth> heads;
  alignas(kLine) Counter taken;  // rounds in which this rank has read all slots
  alignas(kLine) std::array<Note, kDepth> notes{};
  std::atomic<uint32_t> left{0};  // closed its communicator in good order
  int64_t pid = 0;
  uint64_t start_time = 0;  // of the process, in clock ticks: a pid is used again
  cpu_set_t cores{};
};

struct SegmentHeader {
  std::array<char, 40> nonce{};
  int64_t ranks = 0;
  /// The first failure, its text once `described` is set.
  alignas(kLine) std::atomic<uint32_t> failed{0};
  std::atomic<uint32_t> described{0};
  std::array<char, 512> failure{};
};

/// Maps the memory. It has no name, so nothing can be left behind in /dev/shm, by a crash neither, and no other job can
/// find it; ranks reach it through its creator's file descriptor.
class Segment {
 public:
  /// Throws std::runtime_error when there is no room.
  static std::shared_ptr<Segment> create(int64_t ranks);
  /// As described by the creator's address(). Ranks of one process share one mapping. Throws std::runtime_error.
  static std::shared_ptr<Segment> open(const std::string& address, int64_t ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  /// "pid descriptor nonce". Valid until close_descriptor().
  std::string address() const;
  /// All ranks have it mapped.
  void close_descriptor();

  int64_t ranks() const { return header().ranks; }
  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
  RankState& state(int64_t rank) const { return states()[rank]; }
  std::byte* slot(int64_t rank, uint32_t round) const;

  /// Records the first failure and wakes everybody. Callable from any thread.
  void fail(std::string_view why) noexcept;
  bool failed() const { return header().failed.load() != 0; }
  /// What the first failure was, as its rank said.
  std::string failure() const;

 private:
  Segment(int descriptor, int64_t ranks);
  RankState* states() const { return reinterpret_cast<RankState*>(base_ + sizeof(SegmentHeader)); }

  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
  int descriptor_ = -1;
};

/// Wakes those who sleep on the counter, if any.
void wake(Counter& counter) noexcept;
/// Sets a counter that only this rank writes, and wakes.
void publish(Counter& counter, uint32_t value) noexcept;
/// Copies as much as there is room for.
void copy_text(std::span<char> to, std::string_view from) noexcept;

/// Clock ticks since boot at which a process started; 0 when it is gone or a zombie.
uint64_t process_start_time(int64_t pid);

}  // namespace fsdp::detail::shm
