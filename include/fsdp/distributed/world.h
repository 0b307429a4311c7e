#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <fsdp/distributed/communicator.h>

namespace fsdp {

struct WorldOptions {
  std::optional<c10::Device> device;  ///< nullopt: cuda:LOCAL_RANK where there is one, else cpu
  std::string backend = "auto";       ///< auto, gloo, shm, nccl, fake; the environment's FSDP_BACKEND replaces auto
  std::chrono::milliseconds timeout{600'000};  ///< bound of every wait
};

/// The processes (or threads) of one job, and this rank's place among them. Owned by shared_ptr;
/// communicators and meshes keep it alive. One thread of a rank uses it at a time.
class World : public std::enable_shared_from_this<World> {
 public:
  struct Impl;
  explicit World(std::unique_ptr<Impl> impl);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int64_t rank() const;
  int64_t size() const;
  int64_t local_rank() const;
  c10::Device device() const;
  const WorldOptions& options() const;
  /// Key-value store shared by all ranks. Keys starting with "fsdp/" belong to the library.
  const c10::intrusive_ptr<c10d::Store>& store() const;
  /// Returns when all ranks have arrived; CommError after the timeout, naming the missing ranks.
  void barrier();

  /// A communicator among `ranks` (ascending world ranks that include this one). Collective among
  /// them; `key` is unique per communicator and equal on its ranks; `axes` is what errors call it.
  std::shared_ptr<Communicator> communicator(std::span<const int64_t> ranks, const std::string& key,
                                             const std::string& axes);
  /// A communicator among all ranks for small messages; what goes over it is not logged. Made at first use, which is
  /// collective.
  Communicator& control();
  /// The next number of a sequence that is equal on all ranks when all create meshes in one order.
  int64_t next_mesh_id();
  /// Fails every communicator of this rank, pending and later operations alike, and leaves `why` in the store, where
  /// ranks of other processes that wait find it within a second: call it when this rank cannot go on. Returns at once;
  /// the destructor gives the message up to two seconds to get out. The first failure of the job stays.
  void abort(std::string_view why = "aborted by the program") noexcept;

  const std::shared_ptr<detail::CommTrace>& trace() const;

 private:
  std::unique_ptr<Impl> impl_;
};

/// Joins the job described by the environment: RANK/WORLD_SIZE/LOCAL_RANK/MASTER_ADDR/MASTER_PORT
/// (torchrun), else OMPI_COMM_WORLD_* (mpirun), PMI_* or SLURM_* (srun), else one rank alone.
/// ValueError for a half-set or contradictory environment or an unknown backend; CommError when the
/// other ranks do not come within the timeout, or belong to another job.
std::shared_ptr<World> init_world(WorldOptions options = {});

/// Runs `body` on `world_size` threads of this process, each with its own World. When a rank throws,
/// the others' communication is aborted so that none is left hanging, and the first failing rank's
/// exception is rethrown here: fsdp errors keep their type, with "rank N: " before the text; any
/// other becomes a std::runtime_error with the original nested.
void run_threads(int64_t world_size, std::function<void(std::shared_ptr<World>)> body, WorldOptions options = {});

}  // namespace fsdp
