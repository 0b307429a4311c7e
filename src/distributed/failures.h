#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <fsdp/distributed/communicator.h>

namespace fsdp::detail {

/// What one rank knows of failures in its job, and the communicators that a failure ends. A process's rank watches the
/// job's store on a thread of its own: the first rank that fails leaves a message there, and the others look while they
/// wait, so that they stop early and can say who failed and why. Thread safe; nothing here throws or waits long.
class JobFailures : public std::enable_shared_from_this<JobFailures> {
 public:
  explicit JobFailures(int64_t rank) : rank_(rank) {}

  int64_t rank() const { return rank_; }

  /// Starts the watching thread, which alone uses `store` from here on. `serves`: this process has the store itself.
  void watch(c10::intrusive_ptr<c10d::Store> store, bool serves);
  /// Ends the thread and forgets the communicators. After a failure it first gives the message time to be written, and
  /// where the store ends with this process, to be read; two seconds at most.
  void stop() noexcept;

  void add(const std::shared_ptr<Communicator>& comm);
  /// Ranks as threads, all of them given here: abort_job() reaches them directly. Communicators live as long as the
  /// world from here on, so that the end of one rank does not look like a lost peer to the others.
  void share(std::vector<std::weak_ptr<JobFailures>> ranks);

  /// Ends all communicators of this rank, and those added later, and does or has the same done at the other ranks.
  void abort_job(const std::string& why) noexcept;
  /// Tells the other processes of this rank's failure, unless the job has one already. Returns at once.
  void report(const std::string& why) noexcept;
  /// Why everything was ended; empty if nothing was.
  std::string ended() const;
  /// The job's first failure if another rank had it, else empty. After report() it waits for the store's answer, half a
  /// second at most.
  std::string first_elsewhere();

  /// The watching thread looks only while a rank waits.
  class Waiting {
   public:
    explicit Waiting(JobFailures& job) : job_(job) { ++job_.waiting_; }
    ~Waiting() { --job_.waiting_; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    JobFailures& job_;
  };

 private:
  void fail_all(const std::string& why) noexcept;
  bool is_own(const std::string& message) const;
  void run(const c10::intrusive_ptr<c10d::Store>& store);
  void exchange(c10d::Store& store, std::unique_lock<std::mutex>& lock, bool look);

  const int64_t rank_;
  std::atomic<int64_t> waiting_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
  bool running_ = false, serves_ = false, stop_ = false;
  std::string report_;  // not written to the store yet
  std::string first_;   // what the store says
  std::string ended_;
  std::vector<std::weak_ptr<JobFailures>> threads_;
  std::vector<std::weak_ptr<Communicator>> communicators_;
  std::vector<std::shared_ptr<Communicator>> kept_;
};

/// The first failure of one communicator: shared by it, its works and its transport. Thread safe.
class CommFailure {
 public:
  explicit CommFailure(std::shared_ptr<JobFailures> job) : job_(std::move(job)) {}

  JobFailures& job() const { return *job_; }
  /// The first one stays.
  void record(const std::string& why) noexcept;
  /// Empty while there is none.
  std::string text() const;
  /// Records and reports `why`, and throws it as a CommError, with the job's first failure where that is another one.
  [[noreturn]] void raise(const std::string& why);

 private:
  const std::shared_ptr<JobFailures> job_;
  mutable std::mutex mutex_;
  std::string text_;
};

/// Reports `why` and throws it, as CommFailure::raise does for one communicator.
[[noreturn]] void raise_failure(JobFailures& job, const std::string& why);

/// What an exception says, without the stack of frames that LibTorch's carry.
std::string text_of(const std::exception& e);

/// Looks into the store until it has all `keys`. Returns the indices of those missing at the deadline. CommError as
/// soon as the job has failed.
std::vector<int64_t> wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys,
                                   std::chrono::milliseconds limit, JobFailures& job);

/// As wait_for_keys, with one key for each world rank in `ranks`; CommError naming those that did not come.
void wait_for_ranks(c10d::Store& store, const std::vector<std::string>& keys, std::span<const int64_t> ranks,
                    std::chrono::milliseconds limit, JobFailures& job);

}  // namespace fsdp::detail
