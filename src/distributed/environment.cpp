#include "distributed/environment.h"

#include <charconv>

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

/// A port that all ranks of a job find and other jobs of the host are unlikely to.
uint16_t job_port(const std::string& job) {
  uint32_t h = 2166136261u;
  for (unsigned char c : job) h = (h ^ c) * 16777619u;
  return static_cast<uint16_t>(20000 + h % 20000);
}

struct Launcher {
  const char *rank, *size, *local_rank, *local_size, *job;
};

constexpr Launcher kLaunchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "PMIX_NAMESPACE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr, "SLURM_JOB_ID"},
};

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
    l.serves_store = l.rank == 0 && get("TORCHELASTIC_USE_AGENT_STORE") != "True";
    l.store_prefix = "fsdp/" + get("TORCHELASTIC_RESTART_COUNT").value_or("0");
    const auto local = find_number(get, "LOCAL_WORLD_SIZE");
    l.single_host = local ? *local == l.size : l.host == "localhost" || l.host == "127.0.0.1";
    return l;
  }
  for (const auto& launcher : kLaunchers) {
    if (!has_pair(get, launcher.rank, launcher.size)) continue;
    l.rank = *find_number(get, launcher.rank);
    l.size = *find_number(get, launcher.size);
    check(l, launcher.rank, launcher.size);
    l.local_rank = find_number(get, launcher.local_rank).value_or(0);
    l.single_host = shares_host(get, launcher, l.size);
    l.store_prefix = "fsdp/0";
    l.serves_store = l.rank == 0;
    read_master(get, l, false);
    if (l.port == 0) {
      if (!l.single_host)
        throw ValueError(
            fmt::format("{}={} ranks run on several hosts: set MASTER_ADDR and MASTER_PORT to the address of "
                        "rank 0",
                        launcher.size, l.size));
      l.port = job_port(get(launcher.job).value_or("fsdp"));
    }
    return l;
  }
  return l;
}

}  // namespace fsdp::detail
