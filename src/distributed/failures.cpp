#include "distributed/failures.h"

#include <algorithm>
#include <exception>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace fsdp::detail {
namespace {

constexpr const char* kKey = "fsdp/failure";
constexpr std::chrono::milliseconds kPeriod(500);

}  // namespace

void JobFailures::watch(c10::intrusive_ptr<c10d::Store> store, bool serves) {
  std::lock_guard lock(mutex_);
  running_ = true;
  serves_ = serves;
  // The thread holds this object: stop() may have to leave it behind in a call that the network does not answer.
  thread_ = std::thread([self = shared_from_this(), store = std::move(store)] { self->run(store); });
}

void JobFailures::stop() noexcept {
  std::vector<std::shared_ptr<Communicator>> kept;
  {
    std::unique_lock lock(mutex_);
    kept.swap(kept_);  // they hold this object
    changed_.wait_for(lock, 2 * kPeriod, [&] { return !running_ || report_.empty(); });
    if (running_ && serves_ && !first_.empty()) {
      lock.unlock();
      std::this_thread::sleep_for(kPeriod * 3 / 2);  // who waits looks once a period
      lock.lock();
    }
    stop_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, kPeriod, [&] { return !running_; });
    if (thread_.joinable() && running_) thread_.detach();
  }
  if (thread_.joinable()) thread_.join();
}

void JobFailures::add(const std::shared_ptr<Communicator>& comm) {
  std::string why;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(communicators_, [](const auto& c) { return c.expired(); });
    communicators_.push_back(comm);
    if (!threads_.empty() && !stop_) kept_.push_back(comm);
    why = ended_;
  }
  if (!why.empty()) comm->fail(why);
}

void JobFailures::share(std::vector<std::weak_ptr<JobFailures>> ranks) {
  std::lock_guard lock(mutex_);
  threads_ = std::move(ranks);
}

void JobFailures::abort_job(const std::string& why) noexcept {
  report(why);
  fail_all(why);
  std::vector<std::weak_ptr<JobFailures>> ranks;
  {
    std::lock_guard lock(mutex_);
    ranks = threads_;
  }
  for (const auto& weak : ranks)
    if (auto other = weak.lock(); other && other.get() != this)
      other->fail_all(fmt::format("another rank failed: {}", why));
}

void JobFailures::fail_all(const std::string& why) noexcept {
  std::vector<std::shared_ptr<Communicator>> live;
  {
    std::lock_guard lock(mutex_);
    if (ended_.empty()) ended_ = why;
    for (const auto& weak : communicators_)
      if (auto comm = weak.lock()) live.push_back(std::move(comm));
  }
  for (const auto& comm : live) comm->fail(why);
}

void JobFailures::report(const std::string& why) noexcept {
  std::lock_guard lock(mutex_);
  if (!running_ || !first_.empty() || !report_.empty()) return;
  report_ = why;
  changed_.notify_all();
}

std::string JobFailures::ended() const {
  std::lock_guard lock(mutex_);
  return ended_;
}

std::string JobFailures::first_elsewhere() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kPeriod, [&] { return !running_ || report_.empty(); });
  return is_own(first_) ? "" : first_;
}

bool JobFailures::is_own(const std::string& message) const {
  return message.starts_with(fmt::format("rank {}:", rank_));
}

void JobFailures::run(const c10::intrusive_ptr<c10d::Store>& store) {
  std::unique_lock lock(mutex_);
  try {
    while (!stop_ || !report_.empty()) {
      if (report_.empty()) changed_.wait_for(lock, kPeriod, [&] { return stop_ || !report_.empty(); });
      const bool look = waiting_ > 0 && ended_.empty();
      if (!report_.empty() || look) exchange(*store, lock, look);
    }
  } catch (const std::exception&) {
    // The process that serves the store is gone: nothing to be told or learned any more. Waits end by themselves.
    if (!lock.owns_lock()) lock.lock();
  }
  running_ = false;
  report_.clear();
  changed_.notify_all();
}

/// Writes the report if the job has no failure yet, and reads what the store has then.
void JobFailures::exchange(c10d::Store& store, std::unique_lock<std::mutex>& lock, bool look) {
  const auto mine = report_;
  lock.unlock();
  std::string first;
  if (!mine.empty())
    first = store.compareSet(kKey, "", mine);
  else if (store.check({kKey}))
    first = store.get_to_str(kKey);
  lock.lock();
  if (!mine.empty()) report_.clear();
  first_ = first;
  changed_.notify_all();
  if (!look || first.empty() || is_own(first)) return;
  lock.unlock();
  fail_all(fmt::format("another rank failed: {}", first));
  lock.lock();
}

void CommFailure::record(const std::string& why) noexcept {
  std::lock_guard lock(mutex_);
  if (text_.empty()) text_ = why;
}

std::string CommFailure::text() const {
  std::lock_guard lock(mutex_);
  return text_;
}

void CommFailure::raise(const std::string& why) {
  record(why);
  raise_failure(*job_, why);
}

void raise_failure(JobFailures& job, const std::string& why) {
  job.report(why);
  const auto first = job.first_elsewhere();
  if (first.empty() || why.find(first) != std::string::npos) throw CommError(why);
  throw CommError(fmt::format("{}; the first failure in the job: {}", why, first));
}

std::string text_of(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  return error ? error->what_without_backtrace() : e.what();
}

std::vector<int64_t> wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys,
                                   std::chrono::milliseconds limit, JobFailures& job) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  auto pause = std::chrono::microseconds(50);
  const JobFailures::Waiting waiting(job);
  try {
    while (!store.check(keys)) {
      if (const auto why = job.ended(); !why.empty()) throw CommError(why);
      if (std::chrono::steady_clock::now() > deadline) {
        std::vector<int64_t> missing;
        for (size_t i = 0; i < keys.size(); ++i)
          if (!store.check({keys[i]})) missing.push_back(static_cast<int64_t>(i));
        return missing;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(5'000));
    }
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {
    throw CommError(fmt::format(
        "lost the rendezvous store, whose process (rank 0, or torchrun's agent) ended or is out of reach: {}",
        text_of(e)));
  }
  return {};
}

void wait_for_ranks(c10d::Store& store, const std::vector<std::string>& keys, std::span<const int64_t> ranks,
                    std::chrono::milliseconds limit, JobFailures& job) {
  auto missing = wait_for_keys(store, keys, limit, job);
  for (auto& r : missing) r = ranks[static_cast<size_t>(r)];
  if (!missing.empty())
    throw CommError(fmt::format("timed out after {} ms; missing ranks: {}", limit.count(), fmt::join(missing, ", ")));
}

}  // namespace fsdp::detail
