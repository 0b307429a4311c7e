#include "distributed/worker.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include <fmt/format.h>

namespace fsdp::detail {

using SteadyClock = std::chrono::steady_clock;

/// When the running operation began and what it waits for. Works outlive the worker, so they share it.
struct CommWorker::Progress {
  explicit Progress(std::chrono::milliseconds timeout)
      // The transport times out by itself and then knows more: this bound is the last resort.
      : limit(timeout + std::min<std::chrono::milliseconds>(timeout, std::chrono::seconds(5))) {}

  void start() { since = SteadyClock::now().time_since_epoch(); }
  SteadyClock::time_point deadline() const { return SteadyClock::time_point(since.load()) + limit; }

  const std::chrono::milliseconds limit;
  std::atomic<SteadyClock::duration> since{};
  std::atomic<const char*> action{"work with"};
  std::atomic<int64_t> peer = -1;
};

struct CommWorker::Job final : WorkImpl {
  std::string what;
  std::function<void()> operation;
  std::shared_ptr<Progress> progress;
  std::mutex mutex;
  std::condition_variable finished;
  bool over = false;
  std::string failure;

  void finish(const std::string& why) {
    {
      std::lock_guard lock(mutex);
      if (over) return;
      over = true;
      failure = why;
    }
    finished.notify_all();
  }

  void wait() override {
    std::unique_lock lock(mutex);
    while (!finished.wait_until(lock, progress->deadline(), [&] { return over; })) {
      if (SteadyClock::now() < progress->deadline()) continue;  // the next operation began meanwhile
      const auto peer = progress->peer.load();
      throw std::runtime_error(fmt::format(
          "the transport did not end within {} ms{}", progress->limit.count(),
          peer < 0 ? "" : fmt::format("; its last action was to {} rank {}", progress->action.load(), peer)));
    }
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  bool done() override {
    std::lock_guard lock(mutex);
    return over;
  }
};

CommWorker::CommWorker(std::chrono::milliseconds timeout, std::shared_ptr<CommFailure> failure)
    : failure_(std::move(failure)), progress_(std::make_shared<Progress>(timeout)) {}

CommWorker::~CommWorker() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  submitted_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<WorkImpl> CommWorker::submit(std::string what, std::function<void()> operation) {
  auto job = std::make_shared<Job>();
  job->what = std::move(what);
  job->operation = std::move(operation);
  job->progress = progress_;
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  if (jobs_.empty()) progress_->start();
  jobs_.push_back(job);
  submitted_.notify_all();
  return job;
}

void CommWorker::doing(const char* action, int64_t world_rank) {
  progress_->action = action;
  progress_->peer = world_rank;
}

void CommWorker::fail(const std::string& why) noexcept {
  failure_->record(why);
  std::deque<std::shared_ptr<Job>> jobs;
  {
    std::lock_guard lock(mutex_);
    jobs = jobs_;
  }
  for (auto& job : jobs) job->finish(why);
}

bool CommWorker::idle() const {
  std::lock_guard lock(mutex_);
  return jobs_.empty();
}

void CommWorker::run() {
  while (true) {
    std::shared_ptr<Job> job;
    bool closed;
    {
      std::unique_lock lock(mutex_);
      submitted_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = jobs_.front();
      closed = stop_;
      progress_->start();
    }
    std::string why = failure_->text();
    if (!why.empty()) {
      why = fmt::format("this communicator failed before: {}", why);
    } else if (closed) {
      why = "this communicator was closed";
    } else {
      try {
        job->operation();
      } catch (const std::exception& e) {
        why = text_of(e);
        if (why.empty()) why = "unknown error";
        // Before the waiter hears of it: what it submits next is refused.
        failure_->record(fmt::format("{} failed: {}", job->what, why));
      }
    }
    job->operation = nullptr;
    {
      std::lock_guard lock(mutex_);
      jobs_.pop_front();
    }
    job->finish(why);
  }
}

}  // namespace fsdp::detail
