#include "distributed/shm/rounds.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::detail::shm {
namespace {

Counter& posted(RankState& s) { return s.posted; }
Counter& taken(RankState& s) { return s.taken; }

/// Counters wrap, so it is their distance that counts.
bool reached(const Counter& counter, uint32_t value) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - value) >= 0;
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Rounds::Rounds(std::shared_ptr<Segment> segment, int64_t rank, std::vector<int64_t> names,
               std::chrono::milliseconds timeout)
    : segment_(std::move(segment)), rank_(rank), names_(std::move(names)), timeout_(timeout) {}

bool Rounds::all_reached(CounterOf counter, uint32_t value) const {
  for (int64_t r = 0; r < segment_->ranks(); ++r)
    if (r != rank_ && !reached(counter(segment_->state(r)), value)) return false;
  return true;
}

bool Rounds::slot_is_free(uint32_t round) const { return all_reached(taken, round - kDepth); }

void Rounds::put(Operation& operation) {
  const uint32_t round = base_ + ++operation.put_;
  auto& me = segment_->state(rank_);
  me.heads[round % kDepth] = {operation.tag_, operation.rounds_};
  if (operation.put_ == 1) copy_text(me.notes[round % kDepth], operation.what_);
  if (operation.put_ <= operation.rounds_) operation.put(operation.put_ - 1, segment_->slot(rank_, round));
  publish(me.posted, round);
}

void Rounds::start(Operation& operation) {
  const auto limit = std::min(operation.rounds_, operation.ahead());
  while (operation.put_ < limit && slot_is_free(base_ + operation.put_ + 1)) put(operation);
}

void Rounds::finish(Operation& operation, Patience patience) {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  uint32_t total = operation.rounds_;
  for (uint32_t i = 0; i < total; ++i) {
    const auto limit = std::min(total, i + operation.ahead());
    while (operation.put_ < limit) {
      const uint32_t next = base_ + operation.put_ + 1;
      if (!slot_is_free(next)) {
        if (operation.put_ > i) break;  // this round can go on; the slot may be free after it
        wait_for_all(taken, next - kDepth, deadline, patience);
      }
      put(operation);
    }
    const uint32_t round = base_ + i + 1;
    wait_for_all(posted, round, deadline, patience);
    if (i == 0) {
      check_heads(operation, round);
      // Ranks may count differently (all_to_all): all stay for the longest.
      total = most_rounds(round);
    }
    operation.get(i, *segment_, round);
    publish(segment_->state(rank_).taken, round);
  }
  base_ += total;
}

uint32_t Rounds::most_rounds(uint32_t round) const {
  uint32_t most = 0;
  for (int64_t r = 0; r < segment_->ranks(); ++r)
    most = std::max(most, segment_->state(r).heads[round % kDepth].rounds);
  return most;
}

void Rounds::check_heads(const Operation& operation, uint32_t round) const {
  for (int64_t r = 0; r < segment_->ranks(); ++r) {
    const auto& state = segment_->state(r);
    if (state.heads[round % kDepth].tag == operation.tag_) continue;
    throw std::runtime_error(
        fmt::format("rank {} runs another collective, or with other counts, root, scale or position: '{}'. All ranks "
                    "must run the same units in the same order",
                    names_[r], state.notes[round % kDepth].data()));
  }
}

void Rounds::wait_for_all(CounterOf counter, uint32_t value, Deadline deadline, Patience patience) {
  for (uint32_t i = 0; i < patience.spins; ++i) {
    if (all_reached(counter, value)) return;
    pause_briefly();
  }
  // Costs little when nobody else wants the core, and hands it over when somebody does.
  constexpr int kYields = 4;
  for (int i = 0; i < kYields; ++i) {
    if (all_reached(counter, value)) return;
    sched_yield();
  }
  if (!all_reached(counter, value)) sleep_until_reached(counter, value, deadline);
}

void Rounds::sleep_until_reached(CounterOf counter, uint32_t value, Deadline deadline) {
  // How often a peer's death or an abort that raced with falling asleep is looked for.
  constexpr auto kSlice = std::chrono::milliseconds(50);
  for (int64_t r = 0; r < segment_->ranks(); ++r) {
    if (r == rank_) continue;
    auto& awaited = counter(segment_->state(r));
    while (!reached(awaited, value)) {
      if (segment_->failed() && !reached(awaited, value)) throw std::runtime_error(segment_->failure());
      const auto left = std::min<std::chrono::nanoseconds>(kSlice, deadline - std::chrono::steady_clock::now());
      if (left.count() > 0) {
        const timespec limit{0, static_cast<long>(left.count())};
        awaited.sleepers.fetch_add(1);
        const auto seen = awaited.value.load();
        long result = 0;
        if (static_cast<int32_t>(seen - value) < 0)
          result = syscall(SYS_futex, &awaited.value, FUTEX_WAIT, seen, &limit, nullptr, 0);
        awaited.sleepers.fetch_sub(1);
        if (result == 0 || errno != ETIMEDOUT) continue;
      }
      check_peers(counter, value, deadline);
    }
  }
}

/// Throws when one that has not come will not come. Who has come may be gone by now.
void Rounds::check_peers(CounterOf counter, uint32_t value, Deadline deadline) const {
  const bool late = std::chrono::steady_clock::now() >= deadline;
  std::vector<int64_t> missing;
  for (int64_t r = 0; r < segment_->ranks(); ++r) {
    auto& state = segment_->state(r);
    if (r == rank_ || reached(counter(state), value)) continue;
    const bool left = state.left.load() != 0;
    const bool dead = state.pid != getpid() && process_start_time(state.pid) != state.start_time;
    // What it did last happened before it left: look again.
    if ((left || dead) && !reached(counter(state), value))
      throw std::runtime_error(fmt::format("rank {} {} (process {})", names_[r],
                                           left ? "has closed its communicator" : "has died", state.pid));
    missing.push_back(names_[r]);
  }
  if (late && !missing.empty())
    throw std::runtime_error(
        fmt::format("nothing came from rank{} {} within {} ms (stopped, late, or not running this collective)",
                    missing.size() > 1 ? "s" : "", fmt::join(missing, ", "), timeout_.count()));
}

}  // namespace fsdp::detail::shm
