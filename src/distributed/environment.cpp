#include "distributed/environment.h"

#include <array>
#include <charconv>
#include <string_view>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp::detail {
namespace {

int64_t number(const char* name, const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    throw ValueError(fmt::format("environment variable {}: expected a number, got '{}'", name, text));
  return value;
}

std::optional<int64_t> find_number(const GetEnv& get, const char* name) {
  auto text = get(name);
  if (!text || text->empty()) return std::nullopt;
  return number(name, *text);
}

/// Both or neither.
bool has_pair(const GetEnv& get, const char* rank, const char* size) {
  const bool a = find_number(get, rank).has_value(), b = find_number(get, size).has_value();
  if (a != b)
    throw ValueError(
        fmt::format("environment variable {} is set without {}: set both (as the launcher does) or neither",
                    a ? rank : size, a ? size : rank));
  return a;
}

void check(const Launch& l, const char* rank, const char* size) {
  if (l.size < 1) throw ValueError(fmt::format("environment variable {}: expected at least 1, got {}", size, l.size));
  if (l.rank < 0 || l.rank >= l.size)
    throw ValueError(
        fmt::format("environment variable {}: expected a rank below {} ({}), got {}", rank, size, l.size, l.rank));
}

void check_local(const Launch& l, std::optional<int64_t> local_size, const char* rank, const char* size) {
  if (l.local_rank < 0)
    throw ValueError(fmt::format("environment variable {}: expected at least 0, got {}", rank, l.local_rank));
  if (local_size && (*local_size < 1 || *local_size > l.size || l.local_rank >= *local_size))
    throw ValueError(
        fmt::format("environment variables {}={} and {}={} contradict each other or the {} ranks of the job", rank,
                    l.local_rank, size, *local_size, l.size));
}

void read_master(const GetEnv& get, Launch& l, bool required) {
  const auto host = get("MASTER_ADDR");
  const auto port = find_number(get, "MASTER_PORT");
  if (required && l.size > 1 && (!host || !port))
    throw ValueError(
        fmt::format("environment variable {} is missing: torchrun sets it; by hand, set MASTER_ADDR and MASTER_PORT "
                    "to the address of rank 0",
                    host ? "MASTER_PORT" : "MASTER_ADDR"));
  if (host) l.host = *host;
  if (port) {
    if (*port < 1 || *port > 65535) throw ValueError(fmt::format("MASTER_PORT: expected 1 to 65535, got {}", *port));
    l.port = static_cast<uint16_t>(*port);
  }
}

/// A port that all ranks of a job find and other jobs of the host are unlikely to; below those that the system gives to
/// outgoing connections. Where two jobs meet all the same, the second cannot open it or sees another job's name.
uint16_t job_port(const std::string& job) {
  uint32_t h = 2166136261u;
  for (unsigned char c : job) h = (h ^ c) * 16777619u;
  return static_cast<uint16_t>(20000 + h % 12000);
}

struct Launcher {
  const char *rank, *size, *local_rank, *local_size;
  std::array<const char*, 3> jobs;  // the first that is set is the job's id
  const char* step;                 // what tells two launches of one job apart, for the last of `jobs`
};

constexpr Launcher kLaunchers[] = {
    {"OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     {"OMPI_COMM_WORLD_JOBID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"},
     nullptr},
    {"PMI_RANK",
     "PMI_SIZE",
     "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS",
     {"PMI_JOBID", "PMIX_NAMESPACE", "SLURM_JOB_ID"},
     "SLURM_STEP_ID"},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr, {nullptr, nullptr, "SLURM_JOB_ID"}, "SLURM_STEP_ID"},
};

std::string job_of(const GetEnv& get, const Launcher& launcher) {
  for (const char* name : launcher.jobs) {
    if (!name) continue;
    const auto id = get(name);
    if (!id || id->empty()) continue;
    const bool last = name == launcher.jobs.back();
    const auto step = last && launcher.step ? get(launcher.step) : std::nullopt;
    return step ? fmt::format("{}.{}", *id, *step) : *id;
  }
  return "";
}

bool shares_host(const GetEnv& get, const Launcher& launcher, int64_t size) {
  if (launcher.local_size) {
    const auto local = find_number(get, launcher.local_size);
    return !local || *local == size;
  }
  const auto nodes = find_number(get, "SLURM_NNODES");
  return !nodes || *nodes == 1;
}

}  // namespace

Launch read_environment(const GetEnv& get) {
  Launch l;
  if (has_pair(get, "RANK", "WORLD_SIZE")) {
    l.rank = *find_number(get, "RANK");
    l.size = *find_number(get, "WORLD_SIZE");
    check(l, "RANK", "WORLD_SIZE");
    l.local_rank = find_number(get, "LOCAL_RANK").value_or(0);
    read_master(get, l, true);
    // torchrun's agent keeps the store itself; a worker that opened one would find the port taken.
    const bool agent = get("TORCHELASTIC_USE_AGENT_STORE") == "True";
    l.serves_store = l.rank == 0 && !agent;
    l.job = get("TORCHELASTIC_RUN_ID").value_or("");
    l.store_prefix = fmt::format("fsdp/{}/{}", l.job, get("TORCHELASTIC_RESTART_COUNT").value_or("0"));
    // The agent's store outlives a restart, after which there may be more or fewer ranks.
    l.job_key = agent ? l.store_prefix + "/job" : "fsdp/job";
    const auto local = find_number(get, "LOCAL_WORLD_SIZE");
    check_local(l, local, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
    l.single_host = local ? *local == l.size : l.host == "localhost" || l.host == "127.0.0.1";
    return l;
  }
  for (const auto& launcher : kLaunchers) {
    // salloc and sbatch say how many tasks there may be; only srun starts them.
    if (launcher.rank == std::string_view("SLURM_PROCID") && !find_number(get, launcher.rank)) continue;
    if (!has_pair(get, launcher.rank, launcher.size)) continue;
    l.rank = *find_number(get, launcher.rank);
    l.size = *find_number(get, launcher.size);
    check(l, launcher.rank, launcher.size);
    l.local_rank = find_number(get, launcher.local_rank).value_or(0);
    if (launcher.local_size)
      check_local(l, find_number(get, launcher.local_size), launcher.local_rank, launcher.local_size);
    l.single_host = shares_host(get, launcher, l.size);
    l.job = job_of(get, launcher);
    l.store_prefix = fmt::format("fsdp/{}/0", l.job);
    l.job_key = "fsdp/job";
    l.serves_store = l.rank == 0;
    read_master(get, l, false);
    if (l.port == 0) {
      if (!l.single_host && l.size > 1)
        throw ValueError(
            fmt::format("{}={} ranks run on several hosts: set MASTER_ADDR and MASTER_PORT to the address of "
                        "rank 0",
                        launcher.size, l.size));
      l.port = job_port(l.job);
    }
    return l;
  }
  return l;
}

}  // namespace fsdp::detail
