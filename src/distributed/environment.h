#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace fsdp::detail {

/// This process's place in its job, as the launcher's environment says.
struct Launch {
  int64_t rank = 0, size = 1, local_rank = 0;
  std::string host = "127.0.0.1";
  uint16_t port = 0;
  bool serves_store = false;  ///< this process opens the rendezvous store at host:port
  bool single_host = true;    ///< all ranks are known to share one host
  std::string job;            ///< the launcher's id of the job; empty where it has none
  std::string job_key;        ///< where rank 0 writes in the store which job it serves
  std::string store_prefix;   ///< differs between jobs, and restarts of one job
};

using GetEnv = std::function<std::optional<std::string>(const char*)>;

/// torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), else Open MPI (OMPI_COMM_WORLD_*), else PMI (PMI_RANK,
/// PMI_SIZE), else Slurm (SLURM_PROCID, SLURM_NTASKS), else one rank alone, as in a shell of salloc, where there is
/// SLURM_NTASKS only. The last three use MASTER_ADDR and MASTER_PORT where set; else, on one host, the loopback and a
/// port derived from the job's id. ValueError naming the variables for a half-set or contradictory environment.
Launch read_environment(const GetEnv& get);

}  // namespace fsdp::detail
