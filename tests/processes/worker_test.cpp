/// The thread that runs a communicator's operations.
#include "distributed/worker.h"

#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::detail {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string failure_of(WorkImpl& work) {
  try {
    work.wait();
  } catch (const std::exception& e) {
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

struct Bench {
  std::shared_ptr<CommFailure> failure = std::make_shared<CommFailure>(std::make_shared<JobFailures>(0));
  CommWorker worker;
  explicit Bench(int timeout_ms) : worker(std::chrono::milliseconds(timeout_ms), failure) {}
};

// The transport should time out by itself; where it does not, the waiter still learns which rank it was about.
TEST(Worker, ATransportThatDoesNotReturnIsLeft) {
  std::promise<void> release;
  Bench s(100);
  auto stuck = s.worker.submit("op", [&] {
    s.worker.doing("receive from", 7);
    release.get_future().wait();
  });
  auto queued = s.worker.submit("next", [] {});
  EXPECT_THAT(failure_of(*stuck), AllOf(HasSubstr("did not end within 200 ms"), HasSubstr("receive from rank 7")));
  EXPECT_THAT(failure_of(*queued), HasSubstr("receive from rank 7"));
  release.set_value();
}

// Each operation has the time limit for itself: five that together take longer are no failure.
TEST(Worker, TheLimitIsPerOperation) {
  Bench s(300);
  std::shared_ptr<WorkImpl> last;
  for (int i = 0; i < 5; ++i)
    last = s.worker.submit("op", [] { std::this_thread::sleep_for(std::chrono::milliseconds(200)); });
  EXPECT_NO_THROW(last->wait());
}

TEST(Worker, TheFirstFailureFailsWhatComesAfter) {
  std::promise<void> submitted;
  Bench s(10'000);
  auto first = s.worker.submit("all_gather of unit 'a'", [&] {
    submitted.get_future().wait();
    throw std::runtime_error("lost rank 3");
  });
  auto second = s.worker.submit("all_gather of unit 'b'", [] {});
  submitted.set_value();
  EXPECT_EQ(failure_of(*first), "lost rank 3");
  EXPECT_THAT(failure_of(*second), HasSubstr("all_gather of unit 'a' failed: lost rank 3"));
  EXPECT_EQ(s.failure->text(), "all_gather of unit 'a' failed: lost rank 3");
  EXPECT_THAT(failure_of(*s.worker.submit("c", [] {})), HasSubstr("unit 'a'"));
}

TEST(Worker, FailWakesWaiters) {
  std::promise<void> release;
  Bench s(60'000);
  auto work = s.worker.submit("op", [&] { release.get_future().wait(); });
  EXPECT_FALSE(work->done());
  s.worker.fail("aborted");
  EXPECT_EQ(failure_of(*work), "aborted");
  release.set_value();
}

}  // namespace
}  // namespace fsdp::detail
