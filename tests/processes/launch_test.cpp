/// How processes become a job: launchers, ranks that do not come, jobs that must not mix.
#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "processes/children.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kCommError = 3;  // exit code of scenarios

/// What Open MPI sets for `rank` of a job.
Variables mpi_variables(int rank, int size, const std::string& job) {
  return {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_SIZE", std::to_string(size)},
          {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(size)},
          {"PMIX_NAMESPACE", job}};
}

TEST(Launch, B28a_OneProcessAlone) {
  Child child("train", {});
  const auto outcome = child.wait();
  EXPECT_FALSE(outcome.hung);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
}

TEST(Launch, ARankThatNeverStartsIsNamed) {
  const int port = free_port();
  Child zero("sum", [&] {
    auto v = torchrun_variables(0, 3, port);
    v["FSDP_TEST_TIMEOUT_MS"] = "4000";
    return v;
  }());
  Child one("sum", torchrun_variables(1, 3, port));
  const auto outcome = zero.wait(), peer = one.wait();
  EXPECT_EQ(outcome.exit_code, kCommError) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("rank 0: init_world"), HasSubstr("missing ranks: 2")));
  // Rank 0 gave up first and told this one.
  EXPECT_EQ(peer.exit_code, kCommError) << peer.output;
  EXPECT_THAT(peer.output, AllOf(HasSubstr("rank 1: init_world"), HasSubstr("missing ranks: 2")));
}

TEST(Launch, WithoutRankZeroNobodyOpensTheStore) {
  auto variables = torchrun_variables(1, 2, free_port());
  variables["FSDP_TEST_TIMEOUT_MS"] = "2000";
  Child one("sum", variables);
  const auto outcome = one.wait();
  EXPECT_EQ(outcome.exit_code, kCommError) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("rank 1 of 2: could not reach the rendezvous store"), HasSubstr("rank 0"),
                                    HasSubstr(variables["MASTER_PORT"])));
}

TEST(Launch, GlooUsesTheInterfaceThatIsNamed) {
  const auto with = [](const std::string& name) {
    return run_ranks("sum", 2, {{"FSDP_BACKEND", "gloo"}, {"GLOO_SOCKET_IFNAME", name}});
  };
  for (const auto& outcome : with("lo")) EXPECT_THAT(outcome.output, HasSubstr("sum 2"));
  for (const auto& outcome : with("nosuch0")) {
    EXPECT_EQ(outcome.exit_code, kCommError) << outcome.output;
    EXPECT_THAT(outcome.output, AllOf(HasSubstr("connecting mesh axis 'dp'"), HasSubstr("nosuch0")));
  }
}

TEST(Launch, TwoJobsOnOneHost) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 2; ++rank)
    for (const std::string job : {"4001", "4002"}) {
      auto variables = mpi_variables(rank, 2, job);
      variables["FSDP_TEST_VALUE"] = job;
      children.push_back(std::make_unique<Child>("sum", variables));
    }
  for (size_t i = 0; i < children.size(); ++i) {
    const auto outcome = children[i]->wait();
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(i % 2 == 0 ? "sum 8002" : "sum 8004"));
  }
}

/// A job of two ranks that waits until `go()`.
class HeldJob {
 public:
  HeldJob(int port, const std::string& id) {
    for (int r = 0; r < 2; ++r) {
      auto variables = torchrun_variables(r, 2, port);
      variables["TORCHELASTIC_RUN_ID"] = id;
      variables["FSDP_TEST_GO"] = go_;
      variables["FSDP_TEST_TIMEOUT_MS"] = "20000";
      children_.push_back(std::make_unique<Child>("sum", variables));
    }
  }
  ~HeldJob() { std::filesystem::remove(go_); }

  void expect_joined() const {
    for (const auto& child : children_) EXPECT_TRUE(child->wait_for_output("joined as"));
  }

  void expect_right_sum() {
    std::ofstream(go_) << "go";
    for (auto& child : children_) {
      const auto outcome = child->wait();
      EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
      EXPECT_THAT(outcome.output, HasSubstr("sum 2"));
    }
  }

 private:
  const std::string go_ = fresh_path();
  std::vector<std::unique_ptr<Child>> children_;
};

TEST(Launch, AJobAtTheAddressOfAnotherIsRefused) {
  const int port = free_port();
  HeldJob job(port, "one");
  std::vector<std::unique_ptr<Child>> others;
  for (int r = 1; r < 3; ++r) {  // without a rank 0, which could come first
    auto variables = torchrun_variables(r, 3, port);
    variables["TORCHELASTIC_RUN_ID"] = "two";
    variables["FSDP_TEST_TIMEOUT_MS"] = "20000";
    others.push_back(std::make_unique<Child>("sum", variables));
  }
  for (auto& other : others) {
    const auto outcome = other->wait();
    EXPECT_EQ(outcome.exit_code, kCommError) << outcome.output;
    EXPECT_THAT(outcome.output,
                AllOf(HasSubstr("job 'one' of 2 ranks"), HasSubstr("job 'two' of 3 ranks"), HasSubstr("MASTER_PORT")));
  }
  job.expect_right_sum();
}

TEST(Launch, ASecondProcessWithOneRankIsRefused) {
  const int port = free_port();
  HeldJob job(port, "one");
  job.expect_joined();
  auto variables = torchrun_variables(1, 2, port);
  variables["TORCHELASTIC_RUN_ID"] = "one";
  Child second("sum", variables);
  const auto outcome = second.wait();
  EXPECT_EQ(outcome.exit_code, kCommError) << outcome.output;
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("rank 1: init_world"), HasSubstr("has this rank already"), HasSubstr("MASTER_PORT")));
  Child zero("sum", torchrun_variables(0, 2, port));
  const auto refused = zero.wait();
  EXPECT_EQ(refused.exit_code, kCommError) << refused.output;
  EXPECT_THAT(refused.output, AllOf(HasSubstr("could not open the rendezvous store"), HasSubstr("MASTER_PORT")));
}

std::vector<std::unique_ptr<Child>> started(const std::vector<std::string>& command, int jobs) {
  std::vector<std::unique_ptr<Child>> children;
  for (int i = 0; i < jobs; ++i) {
    Variables variables{{"FSDP_TEST_VALUE", std::to_string(i + 1)}, {"FSDP_TEST_TIMEOUT_MS", "30000"}};
    children.push_back(std::make_unique<Child>("sum", variables, command));
  }
  return children;
}

TEST(Launch, LaunchScript) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto outcome = started({FSDP_LAUNCH_SH, "2", self}, 1)[0]->wait();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("joined as 0 of 2"), HasSubstr("joined as 1 of 2"), HasSubstr("sum 2")));
  // One rank fails, the other would wait for ever.
  Child failing("", {}, {FSDP_LAUNCH_SH, "2", "/bin/sh", "-c", "test $RANK = 0 && exit 7; sleep 600"});
  const auto failed = failing.wait();
  EXPECT_FALSE(failed.hung);
  EXPECT_EQ(failed.exit_code, 7) << failed.output;
  Child wrong("", {}, {FSDP_LAUNCH_SH, self});
  EXPECT_EQ(wrong.wait().exit_code, 2);
}

TEST(Launch, Torchrun) {
  const std::string torchrun = FSDP_TORCHRUN;
  if (!std::filesystem::exists(torchrun)) GTEST_SKIP() << "no torchrun here (Python's torch has it)";
  const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
  auto children = started({torchrun, "--no-python", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
                           "--master-port", std::to_string(free_port()), self},
                          1);
  const auto outcome = children[0]->wait();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("joined as 0 of 2"), HasSubstr("joined as 1 of 2"), HasSubstr("sum 2")));
}

// Two at once, without a port: each finds its own by the launcher's id of the job.
TEST(Launch, Mpirun) {
  const std::string mpirun = FSDP_MPIRUN;
  if (!std::filesystem::exists(mpirun)) GTEST_SKIP() << "no mpirun here";
  const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
  auto children = started({mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", self}, 2);
  for (int i = 0; i < 2; ++i) {
    const auto outcome = children[static_cast<size_t>(i)]->wait();
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_THAT(outcome.output, AllOf(HasSubstr("joined as 0 of 2"), HasSubstr("joined as 1 of 2"),
                                      HasSubstr("sum " + std::to_string(2 * (i + 1)))));
  }
}

}  // namespace
}  // namespace fsdp::testing
