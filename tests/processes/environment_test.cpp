/// What the launchers' variables mean, and which are refused.
#include "distributed/environment.h"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp::detail {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

Launch read(const Variables& variables) {
  return read_environment([&](const char* name) -> std::optional<std::string> {
    const auto it = variables.find(name);
    return it == variables.end() ? std::nullopt : std::optional(it->second);
  });
}

std::string refused(const Variables& variables) {
  try {
    read(variables);
  } catch (const ValueError& e) {
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

Variables with(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

const Variables kTorchrun{{"RANK", "3"},           {"WORLD_SIZE", "8"},
                          {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "2"},
                          {"MASTER_ADDR", "node"}, {"MASTER_PORT", "1234"}};
const Variables kMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                     {"OMPI_COMM_WORLD_SIZE", "4"},
                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                     {"PMIX_NAMESPACE", "77"}};
const Variables kPmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kSlurm{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"},   {"SLURM_LOCALID", "1"},
                       {"SLURM_NNODES", "1"}, {"SLURM_JOB_ID", "900"}, {"SLURM_STEP_ID", "0"}};

TEST(Environment, NothingSetIsOneRankAlone) {
  const auto l = read({});
  EXPECT_EQ(l.rank, 0);
  EXPECT_EQ(l.size, 1);
  EXPECT_EQ(l.local_rank, 0);
}

TEST(Environment, Torchrun) {
  auto l = read(kTorchrun);
  EXPECT_EQ(l.rank, 3);
  EXPECT_EQ(l.size, 8);
  EXPECT_EQ(l.local_rank, 1);
  EXPECT_EQ(l.host, "node");
  EXPECT_EQ(l.port, 1234);
  EXPECT_FALSE(l.serves_store);
  EXPECT_FALSE(l.single_host);
  const auto zero = with(kTorchrun, {{"RANK", "0"}});
  EXPECT_TRUE(read(zero).serves_store);
  EXPECT_FALSE(read(with(zero, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).serves_store);
  EXPECT_TRUE(read(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "8"}})).single_host);
  // Restarts of a job, and other jobs, keep apart.
  const auto run = with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "a"}});
  EXPECT_NE(read(run).store_prefix, read(with(run, {{"TORCHELASTIC_RESTART_COUNT", "1"}})).store_prefix);
  EXPECT_NE(read(run).store_prefix, read(kTorchrun).store_prefix);
  EXPECT_EQ(read(run).job, "a");
}

TEST(Environment, OpenMpi) {
  const auto l = read(kMpi);
  EXPECT_EQ(l.rank, 1);
  EXPECT_EQ(l.size, 4);
  EXPECT_EQ(l.local_rank, 1);
  EXPECT_TRUE(l.single_host);
  EXPECT_EQ(l.host, "127.0.0.1");
  EXPECT_EQ(l.job, "77");
  EXPECT_GE(l.port, 20000);
  // All ranks of a job find one port and prefix; another job has others.
  const auto zero = read(with(kMpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}));
  EXPECT_TRUE(zero.serves_store);
  EXPECT_EQ(zero.port, l.port);
  EXPECT_EQ(zero.store_prefix, l.store_prefix);
  const auto other = read(with(kMpi, {{"PMIX_NAMESPACE", "78"}}));
  EXPECT_NE(other.port, l.port);
  EXPECT_NE(other.store_prefix, l.store_prefix);
  EXPECT_EQ(read(with(kMpi, {{"OMPI_COMM_WORLD_JOBID", "5"}})).job, "5");
  EXPECT_EQ(read(with(kMpi, {{"MASTER_PORT", "4321"}})).port, 4321);
}

TEST(Environment, PmiAndSlurm) {
  auto l = read(kPmi);
  EXPECT_EQ(l.rank, 1);
  EXPECT_EQ(l.size, 2);
  EXPECT_EQ(l.local_rank, 1);
  EXPECT_TRUE(l.single_host);
  EXPECT_NE(read(with(kPmi, {{"PMI_JOBID", "a"}})).port, read(with(kPmi, {{"PMI_JOBID", "b"}})).port);
  l = read(kSlurm);
  EXPECT_EQ(l.rank, 1);
  EXPECT_EQ(l.size, 2);
  EXPECT_EQ(l.local_rank, 1);
  EXPECT_EQ(l.job, "900.0");
  // Two steps of one allocation are two jobs.
  EXPECT_NE(read(with(kSlurm, {{"SLURM_STEP_ID", "1"}})).port, l.port);
}

// A shell that salloc opened knows how many tasks there may be, and is none of them.
TEST(Environment, AShellOfSallocIsOneRankAlone) {
  const auto l = read({{"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "900"}});
  EXPECT_EQ(l.rank, 0);
  EXPECT_EQ(l.size, 1);
}

TEST(Environment, HalfSetIsRefused) {
  EXPECT_THAT(refused({{"RANK", "0"}}), AllOf(HasSubstr("RANK"), HasSubstr("WORLD_SIZE")));
  EXPECT_THAT(refused({{"WORLD_SIZE", "2"}}), AllOf(HasSubstr("RANK"), HasSubstr("WORLD_SIZE")));
  EXPECT_THAT(refused({{"OMPI_COMM_WORLD_RANK", "0"}}), HasSubstr("OMPI_COMM_WORLD_SIZE"));
  EXPECT_THAT(refused({{"PMI_SIZE", "2"}}), HasSubstr("PMI_RANK"));
  EXPECT_THAT(refused({{"SLURM_PROCID", "0"}}), HasSubstr("SLURM_NTASKS"));
  EXPECT_THAT(refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}), HasSubstr("MASTER_PORT"));
  // Open MPI over hosts: nothing says where rank 0 is.
  EXPECT_THAT(refused(with(kMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}})), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(refused(with(kSlurm, {{"SLURM_NNODES", "2"}})), HasSubstr("MASTER_ADDR"));
}

TEST(Environment, ContradictionsAreRefused) {
  EXPECT_THAT(refused(with(kTorchrun, {{"RANK", "8"}})), AllOf(HasSubstr("RANK"), HasSubstr("8")));
  EXPECT_THAT(refused(with(kTorchrun, {{"RANK", "-1"}})), HasSubstr("RANK"));
  EXPECT_THAT(refused(with(kTorchrun, {{"RANK", "one"}})), AllOf(HasSubstr("RANK"), HasSubstr("'one'")));
  EXPECT_THAT(refused(with(kTorchrun, {{"WORLD_SIZE", "0"}})), HasSubstr("WORLD_SIZE"));
  EXPECT_THAT(refused(with(kTorchrun, {{"MASTER_PORT", "70000"}})), HasSubstr("MASTER_PORT"));
  EXPECT_THAT(refused(with(kTorchrun, {{"LOCAL_RANK", "2"}})), AllOf(HasSubstr("LOCAL_RANK=2"), HasSubstr("=2")));
  EXPECT_THAT(refused(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}})), HasSubstr("LOCAL_WORLD_SIZE=9"));
  EXPECT_THAT(refused(with(kMpi, {{"OMPI_COMM_WORLD_RANK", "4"}})), HasSubstr("OMPI_COMM_WORLD_RANK"));
}

}  // namespace
}  // namespace fsdp::detail
