#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <fsdp/distributed/world.h>

#include "distributed/world_impl.h"

namespace fsdp {
namespace {

/// A store whose waits end when a rank fails: HashStore itself would wait for the dead rank's key until the timeout.
class ThreadStore final : public c10d::HashStore {
 public:
  void stop() {
    std::lock_guard lock(m_);
    stopped_ = true;
    cv_.notify_all();
  }

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key}, timeout_);
    return c10d::HashStore::get(key);
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }

  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    std::unique_lock lock(m_);
    const bool there = cv_.wait_for(lock, timeout, [&] { return stopped_ || checkLocked(lock, keys); });
    if (stopped_) throw CommError("aborted, because another rank failed");
    if (!there) throw CommError(fmt::format("timed out after {} ms waiting for the other ranks", timeout.count()));
  }

 private:
  bool stopped_ = false;
};

/// The library's own errors of communication begin with the rank already.
std::string with_rank(int64_t rank, const std::string& text) {
  const auto prefix = fmt::format("rank {}: ", rank);
  return text.starts_with(prefix) ? text : prefix + text;
}

std::string with_rank(int64_t rank, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return with_rank(rank, detail::text_of(e));
  } catch (...) {
    return with_rank(rank, "an exception that is not a std::exception");
  }
}

template <class E>
[[noreturn]] void rethrow_as(int64_t rank, const std::exception& e) {
  throw E(with_rank(rank, e.what()));
}

[[noreturn]] void rethrow(int64_t rank, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const ValueError& e) {
    rethrow_as<ValueError>(rank, e);
  } catch (const StateError& e) {
    rethrow_as<StateError>(rank, e);
  } catch (const CommError& e) {
    rethrow_as<CommError>(rank, e);
  } catch (const CheckpointError& e) {
    rethrow_as<CheckpointError>(rank, e);
  } catch (...) {
    std::throw_with_nested(std::runtime_error(with_rank(rank, error)));
  }
}

}  // namespace

void run_threads(int64_t world_size, std::function<void(std::shared_ptr<World>)> body, WorldOptions options) {
  if (world_size < 1) throw ValueError(fmt::format("run_threads: expected at least one rank, got {}", world_size));
  auto store = c10::make_intrusive<ThreadStore>();
  store->setTimeout(options.timeout);
  // The worlds live until all ranks are done: a rank that returns early closes no connection under the others.
  std::vector<std::shared_ptr<World>> worlds;
  for (int64_t r = 0; r < world_size; ++r) {
    auto impl = std::make_unique<World::Impl>();
    detail::settle_options(*impl, options);
    impl->rank = impl->local_rank = r;
    impl->size = world_size;
    impl->store = store;
    impl->trace = std::make_shared<detail::CommTrace>(r);
    worlds.push_back(std::make_shared<World>(std::move(impl)));
  }

  std::vector<std::weak_ptr<detail::JobFailures>> failures;
  for (auto& world : worlds) failures.push_back(world->trace()->failures());
  for (auto& world : worlds) world->trace()->failures()->share(failures);

  std::mutex mutex;
  std::exception_ptr first;
  int64_t failed = -1;
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < world_size; ++r)
    threads.emplace_back([&, r] {
      try {
        body(worlds[r]);
      } catch (...) {
        {
          std::lock_guard lock(mutex);
          if (first) return;
          first = std::current_exception();
          failed = r;
        }
        // Only after the first failure is on record: what follows from this fails later.
        worlds[r]->trace()->failures()->abort_job(with_rank(r, std::current_exception()));
        store->stop();
      }
    });
  for (auto& t : threads) t.join();
  if (first) rethrow(failed, first);
}

}  // namespace fsdp
