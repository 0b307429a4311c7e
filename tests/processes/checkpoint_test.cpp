/// A rank that fails while a checkpoint is written: the others hear of it, and nothing that was saved before is lost.
#include <csignal>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "processes/children.h"
#include "support/folder.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kCommError = 3, kCheckpointError = 5;  // exit codes of scenarios

/// A new job, of another number of ranks, after the failure.
void expect_first_survives(const TemporaryFolder& folder, const std::string& missing) {
  EXPECT_TRUE(std::filesystem::exists(folder / "S1"));
  EXPECT_FALSE(std::filesystem::exists(folder / "S2"));
  for (const auto& rank : run_ranks("load_both", 3, {{"FSDP_TEST_FOLDER", folder.path().string()}})) {
    EXPECT_EQ(rank.exit_code, 0) << rank.output;
    EXPECT_THAT(rank.output, AllOf(HasSubstr("S2: load_checkpoint: there is no checkpoint"), HasSubstr(missing),
                                   HasSubstr("S1: 16384"), HasSubstr("S2 saved again")));
  }
}

TEST(CheckpointFaults, B51_AWriteThatTheSystemRefuses) {
  for (const std::string failing : {"0", "1"}) {
    TemporaryFolder folder;
    const auto ranks = run_ranks(
        "save_twice", 2,
        {{"FSDP_TEST_FOLDER", folder.path().string()}, {"FSDP_TEST_FAULT", "write"}, {"FSDP_TEST_RANK", failing}});
    for (const auto& rank : ranks) {
      EXPECT_EQ(rank.exit_code, kCheckpointError) << rank.output;
      EXPECT_THAT(rank.output, AllOf(HasSubstr("save_checkpoint: rank " + failing + ": cannot write"),
                                     HasSubstr("rank-0000" + failing + ".safetensors"), HasSubstr("File too large")));
    }
    expect_first_survives(folder, "rank " + failing + " did not finish rank-0000" + failing + ".safetensors");
  }
}

TEST(CheckpointFaults, B51_ARankThatDiesInAWrite) {
  TemporaryFolder folder;
  const auto ranks =
      run_ranks("save_twice", 2, {{"FSDP_TEST_FOLDER", folder.path().string()}, {"FSDP_TEST_FAULT", "kill"}});
  EXPECT_EQ(ranks[1].signal, SIGXFSZ);
  EXPECT_EQ(ranks[0].exit_code, kCommError) << ranks[0].output;
  EXPECT_THAT(ranks[0].output, AllOf(HasSubstr("save_checkpoint"), HasSubstr("rank 1")));
  expect_first_survives(folder, "rank 1 did not finish rank-00001.safetensors");
}

}  // namespace
}  // namespace fsdp::testing
