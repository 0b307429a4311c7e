#include "distributed/shm/queue.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

namespace fsdp::detail::shm {
namespace {

using Clock = std::chrono::steady_clock;

/// After this time peers may be waiting for what the caller does not run.
constexpr auto kPatience = std::chrono::milliseconds(10);
/// The helper looks by itself for so long after the last operation, so that submitting needs no system call.
constexpr int kLooks = 50;
/// Less than this is moved by submit() and wait() sooner than by waking the helper.
constexpr int64_t kWorthWaking = 128 * 1024;

}  // namespace

/// Over once, then it never touches the queue: Work may outlive its communicator.
struct Queue::Job final : WorkImpl {
  std::weak_ptr<Queue> queue;  // set before anybody waits, then only read: waiters and the helper need no lock for it
  std::unique_ptr<Operation> operation;
  Clock::time_point submitted;
  bool hurry = false;
  std::string failure;
  std::atomic<bool> over = false;

  /// Under the queue's lock.
  void finish(const std::string& why) {
    if (over) return;
    failure = why;
    over = true;
  }

  void wait() override {
    // A queue that is gone has ended its jobs first.
    if (!over)
      if (const auto owner = queue.lock()) owner->wait_for(*this);
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  bool done() override { return over; }
};

Queue::Queue(Rounds rounds, std::chrono::milliseconds timeout, CorePlan cores, std::shared_ptr<CommFailure> failure)
    : rounds_(std::move(rounds)), timeout_(timeout), cores_(cores), process_(getpid()), failure_(std::move(failure)) {}

Queue::~Queue() = default;

bool Queue::forked() const { return getpid() != process_; }

std::shared_ptr<WorkImpl> Queue::submit(std::unique_ptr<Operation> operation, int64_t bytes) {
  auto job = std::make_shared<Job>();
  if (forked()) {
    job->finish("this process was forked from the rank: only the rank itself can communicate");
    return job;
  }
  job->operation = std::move(operation);
  job->hurry = cores_.spare && bytes >= kWorthWaking;
  job->submitted = Clock::now();
  Lock lock(mutex_);
  if (rounds_.segment().failed()) {
    job->finish(rounds_.segment().failure());
    return job;
  }
  job->queue = weak_from_this();
  jobs_.push_back(job);
  if (!running_ && jobs_.size() == 1 && !job->hurry) {
    // Not under the lock: abort() must not wait for a copy.
    running_ = true;
    lock.unlock();
    rounds_.start(*job->operation);
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
  if (!helper_.joinable()) helper_ = std::thread([this] { help(); });
  if (job->hurry || helper_sleeps_) {
    helper_sleeps_ = false;
    helper_due_.notify_one();
  }
  return job;
}

/// With the lock, which is released meanwhile; `running_` is false and there is a front operation.
void Queue::run_front(Lock& lock, Patience patience) {
  const auto job = jobs_.front();
  running_ = true;
  lock.unlock();
  std::string why;
  try {
    rounds_.finish(*job->operation, patience);
  } catch (const std::exception& e) {
    why = e.what();
    if (why.empty()) why = "unknown error";
    // Before the waiter hears of it: what it submits next is refused.
    const auto text = fmt::format("{} failed: {}", job->operation->what(), why);
    failure_->record(text);
    rounds_.segment().fail(text);
  }
  job->operation.reset();  // before anybody learns that it is over: its tensors are free then
  lock.lock();
  running_ = false;
  jobs_.pop_front();
  job->finish(why);
  if (!why.empty()) drop_waiting(fmt::format("this communicator failed before: {}", failure_->text()));
  changed_.notify_all();
}

void Queue::wait_for(const Job& job) {
  Lock lock(mutex_);
  // What runs has its own deadline, and there may be several before this one. The last resort.
  const auto last = Clock::now() + timeout_ * 2 + std::chrono::seconds(5);
  while (!job.over) {
    if (!running_)
      run_front(lock, cores_.caller);
    else if (changed_.wait_until(lock, last) == std::cv_status::timeout && !job.over)
      throw std::runtime_error("timed out");
  }
}

void Queue::help() {
  Lock lock(mutex_);
  int looks = 0;
  while (!stop_) {
    if (jobs_.empty() || running_) {
      if (!jobs_.empty()) looks = 0;
      if (++looks > kLooks) {
        helper_sleeps_ = true;
        helper_due_.wait(lock, [&] { return stop_ || !helper_sleeps_; });
        looks = 0;
      } else {
        helper_due_.wait_for(lock, kPatience);
      }
      continue;
    }
    looks = 0;
    const bool hurry = std::any_of(jobs_.begin(), jobs_.end(), [](const auto& j) { return j->hurry; });
    const auto due = jobs_.front()->submitted + kPatience;
    if (hurry || Clock::now() >= due)
      run_front(lock, cores_.helper);
    else
      helper_due_.wait_until(lock, due);
  }
}

/// All but the running one: whoever runs that takes it off, and it throws soon, as the segment has failed too.
void Queue::drop_waiting(const std::string& why) {
  auto jobs = std::exchange(jobs_, {});
  if (running_) {
    jobs_.push_back(jobs.front());
    jobs.pop_front();
  }
  for (auto& job : jobs) {
    job->finish(why);
    job->operation.reset();
  }
}

void Queue::abort(const std::string& why) noexcept {
  if (forked()) return;
  rounds_.segment().fail(why);
  try {
    std::lock_guard lock(mutex_);
    drop_waiting(why);
    changed_.notify_all();
  } catch (const std::exception&) {
    // No memory for a text: the segment has failed, and so will all that runs.
  }
}

void Queue::close() {
  if (forked()) {
    // The helper is not in this process, and the segment is the rank's.
    if (helper_.joinable()) helper_.detach();
    return;
  }
  bool pending;
  {
    std::lock_guard lock(mutex_);
    pending = !jobs_.empty();
    stop_ = true;
  }
  if (pending) abort(fmt::format("rank {} closed this communicator with operations pending", rounds_.name()));
  helper_due_.notify_all();
  if (helper_.joinable()) helper_.join();
  rounds_.segment().state(rounds_.rank()).left.store(1);
}

}  // namespace fsdp::detail::shm
