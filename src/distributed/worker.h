#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "distributed/failures.h"

namespace fsdp::detail {

/// Runs the operations of one communicator in the order of their submission, on a thread of its own, so that the caller
/// computes meanwhile. The first failure breaks the communicator: it fails what waits and all that comes later.
class CommWorker {
 public:
  CommWorker(std::chrono::milliseconds timeout, std::shared_ptr<CommFailure> failure);
  /// Joins; the owner has aborted the transport before if operations may still hang.
  ~CommWorker();
  CommWorker(const CommWorker&) = delete;
  CommWorker& operator=(const CommWorker&) = delete;

  /// `operation` owns the tensors it touches; it is destroyed after it ran. It ends by itself within the timeout; one
  /// that does not fails its waiters a little later all the same. `what`: OpInfo::what.
  std::shared_ptr<WorkImpl> submit(std::string what, std::function<void()> operation);
  /// For the running operation: what it waits for now ("receive from", rank in the world). `action` is static.
  void doing(const char* action, int64_t world_rank);
  /// Wakes everybody who waits, and fails all later operations. Callable from any thread.
  void fail(const std::string& why) noexcept;
  bool idle() const;

 private:
  struct Job;
  struct Progress;
  void run();

  const std::shared_ptr<CommFailure> failure_;
  const std::shared_ptr<Progress> progress_;
  mutable std::mutex mutex_;
  std::condition_variable submitted_;
  std::deque<std::shared_ptr<Job>> jobs_;  // the front one is running
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace fsdp::detail
