#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <fsdp/distributed/communicator.h>

namespace fsdp::detail {

/// Runs the operations of one communicator in the order of their submission, on a thread of its own, so that the caller
/// computes meanwhile. The first failure breaks the communicator: it fails what waits and all that comes later.
class CommWorker {
 public:
  explicit CommWorker(std::chrono::milliseconds timeout) : timeout_(timeout) {}
  /// Joins; the owner has aborted the transport before if operations may still hang.
  ~CommWorker();
  CommWorker(const CommWorker&) = delete;
  CommWorker& operator=(const CommWorker&) = delete;

  /// `operation` owns the tensors it touches; it is destroyed after it ran.
  std::shared_ptr<WorkImpl> submit(std::function<void()> operation);
  /// Wakes everybody who waits. Callable from any thread.
  void fail(const std::string& why) noexcept;
  bool idle() const;

 private:
  struct Job;
  void run();

  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::condition_variable submitted_;
  std::deque<std::shared_ptr<Job>> jobs_;  // the front one is running
  std::string failure_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace fsdp::detail
