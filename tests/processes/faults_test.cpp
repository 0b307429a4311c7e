/// A rank that fails in the middle of training ends the others with an error that says who, where and why.
#include <csignal>
#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "processes/children.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr int kCommError = 3;  // exit codes of scenarios
constexpr int kOtherException = 4;

/// The survivor's error names the operation, the axis and the failed rank.
void expect_names_rank(const Outcome& survivor, int rank) {
  EXPECT_FALSE(survivor.hung);
  EXPECT_EQ(survivor.exit_code, kCommError) << survivor.output;
  EXPECT_THAT(survivor.output, AllOf(ContainsRegex("CommError: rank [0-9]+: (all_gather|reduce_scatter|all_reduce)"),
                                     HasSubstr("on mesh axis '"), HasSubstr("rank " + std::to_string(rank))));
}

class Faults : public ::testing::TestWithParam<const char*> {
 protected:
  Variables with(Variables variables) const {
    variables["FSDP_BACKEND"] = GetParam();
    return variables;
  }
};

TEST_P(Faults, AKilledRank) {
  const auto ranks = run_ranks("train", 3, with({{"FSDP_TEST_FAULT", "kill"}}));
  EXPECT_EQ(ranks[1].signal, SIGKILL);
  expect_names_rank(ranks[0], 1);
  expect_names_rank(ranks[2], 1);
}

TEST_P(Faults, ARankThatExits) {
  const auto ranks = run_ranks("train", 2, with({{"FSDP_TEST_FAULT", "exit"}, {"FSDP_TEST_RANK", "1"}}));
  EXPECT_EQ(ranks[1].exit_code, 1);
  expect_names_rank(ranks[0], 1);
}

// The process of rank 0 also serves the store.
TEST_P(Faults, RankZeroExits) {
  const auto ranks = run_ranks("train", 2, with({{"FSDP_TEST_FAULT", "exit"}, {"FSDP_TEST_RANK", "0"}}));
  EXPECT_EQ(ranks[0].exit_code, 1);
  expect_names_rank(ranks[1], 0);
}

TEST_P(Faults, ARankThatThrows) {
  const auto ranks = run_ranks("train", 2, with({{"FSDP_TEST_FAULT", "throw"}}));
  EXPECT_EQ(ranks[1].exit_code, kOtherException);
  expect_names_rank(ranks[0], 1);
}

TEST_P(Faults, ARankThatThrowsOutOfMain) {
  const auto ranks = run_ranks("train", 2, with({{"FSDP_TEST_FAULT", "terminate"}}));
  EXPECT_EQ(ranks[1].signal, SIGABRT);
  // The survivor leaves main with the error too.
  EXPECT_FALSE(ranks[0].hung);
  EXPECT_EQ(ranks[0].signal, SIGABRT);
  EXPECT_THAT(ranks[0].output, AllOf(HasSubstr("CommError"), HasSubstr("rank 1")));
}

TEST_P(Faults, AnAbortTellsTheReason) {
  const auto ranks = run_ranks("train", 2, with({{"FSDP_TEST_FAULT", "abort"}, {"FSDP_TEST_TIMEOUT_MS", "30000"}}));
  EXPECT_EQ(ranks[1].exit_code, kOtherException);
  expect_names_rank(ranks[0], 1);
  EXPECT_THAT(ranks[0].output, HasSubstr("rank 1: the loss is not a number"));
}

TEST_P(Faults, ARankThatStandsStill) {
  const int port = free_port();
  std::vector<std::unique_ptr<Child>> children;
  for (int r = 0; r < 2; ++r) {
    auto variables = with(torchrun_variables(r, 2, port));
    variables["FSDP_TEST_FAULT"] = "stop";
    variables["FSDP_TEST_TIMEOUT_MS"] = "3000";
    children.push_back(std::make_unique<Child>("train", variables));
  }
  const auto survivor = children[0]->wait();
  children[1]->kill();
  expect_names_rank(survivor, 1);
  EXPECT_THAT(survivor.output, HasSubstr("3000 ms"));
}

// Rank 0 shares no communicator with rank 3: it hears of it through the job's store.
TEST_P(Faults, ARankOfAnotherAxis) {
  const auto ranks = run_ranks("train_grid", 4, with({{"FSDP_TEST_FAULT", "kill"}, {"FSDP_TEST_RANK", "3"}}));
  EXPECT_EQ(ranks[3].signal, SIGKILL);
  for (int r = 0; r < 3; ++r) expect_names_rank(ranks[static_cast<size_t>(r)], 3);
}

TEST_P(Faults, UnitsInAnotherOrderAreNamed) {
  const auto ranks = run_ranks("other_order", 2, with({{"FSDP_DEBUG", "1"}}));
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank.exit_code, kCommError) << rank.output;
    EXPECT_THAT(rank.output, AllOf(HasSubstr("unit 'first'"), HasSubstr("unit 'second'"),
                                   HasSubstr("rank 0 all_gather"), HasSubstr("rank 1 all_gather")));
  }
}

TEST_P(Faults, AnExceptionInsideAStepLeavesNothingBehind) {
  for (const auto& rank : run_ranks("unwind", 2, with({}))) {
    EXPECT_EQ(rank.exit_code, 0) << rank.output;
    EXPECT_THAT(rank.output, HasSubstr("caught mid-step"));
  }
  for (const auto& rank : run_ranks("outlive", 2, with({}))) EXPECT_EQ(rank.exit_code, 0) << rank.output;
}

INSTANTIATE_TEST_SUITE_P(Backends, Faults, ::testing::Values("gloo", "shm"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace fsdp::testing
