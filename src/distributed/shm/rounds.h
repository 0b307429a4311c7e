#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/distributed/communicator.h>

#include "distributed/shm/segment.h"

namespace fsdp::detail::shm {

/// One collective, cut into rounds. In a round every rank puts into its slot what the others need and then gets from
/// theirs. Owns the tensors it touches.
class Operation {
 public:
  Operation(const OpInfo& info, uint32_t rounds) : what_(info.what), tag_(info.tag), rounds_(rounds) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  /// Rounds that may be put before the first of them was got.
  virtual uint32_t ahead() const { return kDepth; }
  /// OpInfo::what.
  const std::string& what() const { return what_; }
  virtual void put(uint32_t round, std::byte* slot) = 0;
  virtual void get(uint32_t round, const Segment& segment, uint32_t slot_round) = 0;

 private:
  friend class Rounds;
  std::string what_;
  uint64_t tag_;
  uint32_t rounds_;
  uint32_t put_ = 0;
};

/// How long to spin before sleeping. None where a rank has no core of its own: the one waited for needs this one.
struct Patience {
  uint32_t spins;
};

/// This rank's part in the rounds of a segment. Operations run one after the other, each on one thread at a time:
///
///   put:  wait until all peers have taken round g - kDepth, so the slot is free; fill it; publish posted = g
///   get:  wait until all peers have posted g; compare tags; read their slots; publish taken = g
///
/// There is one wait for peers' data per round and, as slots alternate, none for free slots while ranks keep pace.
class Rounds {
 public:
  /// `names`: what errors call the ranks, their ranks in the world.
  Rounds(std::shared_ptr<Segment> segment, int64_t rank, std::vector<int64_t> names, std::chrono::milliseconds timeout);

  /// Puts what there is room for now, without waiting, so that peers can go on while this rank computes. Only when all
  /// earlier operations are finished.
  void start(Operation& operation);
  /// The rest. Throws std::exception when a peer is late, gone, aborted, or runs something else.
  void finish(Operation& operation, Patience patience);

  Segment& segment() const { return *segment_; }
  int64_t rank() const { return rank_; }
  /// This rank in the world.
  int64_t name() const { return names_[rank_]; }

 private:
  using CounterOf = Counter& (*)(RankState&);
  using Deadline = std::chrono::steady_clock::time_point;
  bool all_reached(CounterOf counter, uint32_t value) const;
  void wait_for_all(CounterOf counter, uint32_t value, Deadline deadline, Patience patience);
  void sleep_until_reached(CounterOf counter, uint32_t value, Deadline deadline);
  void check_peers(CounterOf counter, uint32_t value, Deadline deadline) const;
  bool slot_is_free(uint32_t round) const;
  void put(Operation& operation);
  void check_heads(const Operation& operation, uint32_t round) const;
  uint32_t most_rounds(uint32_t round) const;

  std::shared_ptr<Segment> segment_;
  int64_t rank_;
  std::vector<int64_t> names_;
  std::chrono::milliseconds timeout_;
  uint32_t base_ = 0;  // rounds of all earlier operations; wraps
};

}  // namespace fsdp::detail::shm
