#include "distributed/worker.h"

#include <stdexcept>

namespace fsdp::detail {

struct CommWorker::Job final : WorkImpl {
  std::function<void()> operation;
  std::chrono::milliseconds timeout;
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
    // The transport times out by itself; the margin is for what was queued before. This bound is the last resort.
    if (!finished.wait_for(lock, timeout * 2 + std::chrono::seconds(5), [&] { return over; }))
      throw std::runtime_error("timed out");
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  bool done() override {
    std::lock_guard lock(mutex);
    return over;
  }
};

CommWorker::~CommWorker() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  submitted_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<WorkImpl> CommWorker::submit(std::function<void()> operation) {
  auto job = std::make_shared<Job>();
  job->operation = std::move(operation);
  job->timeout = timeout_;
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) {
    job->finish("the communicator failed before: " + failure_);
    return job;
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  jobs_.push_back(job);
  submitted_.notify_all();
  return job;
}

void CommWorker::fail(const std::string& why) noexcept {
  std::deque<std::shared_ptr<Job>> jobs;
  {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = why;
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
    bool broken;
    {
      std::unique_lock lock(mutex_);
      submitted_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = jobs_.front();
      broken = !failure_.empty() || stop_;
    }
    std::string why;
    if (broken) {
      why = "the communicator was closed or failed before";
    } else {
      try {
        job->operation();
      } catch (const std::exception& e) {
        why = e.what();
        if (why.empty()) why = "unknown error";
      }
    }
    job->operation = nullptr;
    {
      std::lock_guard lock(mutex_);
      jobs_.pop_front();
    }
    if (!why.empty() && !broken) fail(why);
    job->finish(why);
  }
}

}  // namespace fsdp::detail
