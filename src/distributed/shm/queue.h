#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <sys/types.h>

#include <fsdp/distributed/communicator.h>

#include "distributed/failures.h"
#include "distributed/shm/rounds.h"

namespace fsdp::detail::shm {

/// Where operations run.
struct CorePlan {
  Patience caller, helper;
  /// There is a core for a helper thread besides those that compute.
  bool spare;
};

/// Runs the operations of one communicator in the order of their submission.
///
/// A second thread only helps when it has a core: else it takes the caller's, and handing an operation over and back
/// (5-50 us) costs more than most operations. So an operation is run by whoever comes first:
///  - submit() puts what fits the slots (half a MiB per rank), so that peers need nothing more from this rank for it;
///  - wait() runs the rest on the calling thread, unless the helper has it;
///  - the helper thread takes large operations at once when there is a spare core, so that they overlap with compute,
///    and otherwise only what nobody waited for in kPatience: peers may depend on it.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  Queue(Rounds rounds, std::chrono::milliseconds timeout, CorePlan cores, std::shared_ptr<CommFailure> failure);
  ~Queue();

  /// `bytes` is what the operation moves, more or less.
  std::shared_ptr<WorkImpl> submit(std::unique_ptr<Operation> operation, int64_t bytes);
  /// Fails all pending and later operations, here and at the peers. Callable from any thread; never blocks.
  void abort(const std::string& why) noexcept;
  /// Ends in good order if nothing is pending, else aborts. Joins the helper.
  void close();

 private:
  struct Job;
  using Lock = std::unique_lock<std::mutex>;
  void run_front(Lock& lock, Patience patience);
  void wait_for(const Job& job);
  void help();
  void drop_waiting(const std::string& why);
  bool forked() const;

  Rounds rounds_;
  const std::chrono::milliseconds timeout_;
  const CorePlan cores_;
  const pid_t process_;
  const std::shared_ptr<CommFailure> failure_;

  std::mutex mutex_;
  std::condition_variable changed_;     // an operation has ended
  std::condition_variable helper_due_;  // the helper has something to do, or shall end
  std::deque<std::shared_ptr<Job>> jobs_;
  bool running_ = false;  // somebody runs the front one
  bool stop_ = false;
  bool helper_sleeps_ = false;
  std::thread helper_;
};

}  // namespace fsdp::detail::shm
