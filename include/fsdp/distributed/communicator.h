#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <fsdp/error.h>
#include <fsdp/placement.h>

namespace fsdp {

namespace detail {
class CommTrace;    // collective log, cross-rank check and failures, shared by a world's communicators
class CommFailure;  // first failure of one communicator

/// What a transport hands back for one submitted operation. Keeps the operation's tensors alive
/// until the operation ends. Destroying it before the end is allowed and does not wait.
class WorkImpl {
 public:
  virtual ~WorkImpl() = default;
  /// CPU: blocks until the result is there. CUDA: makes the current stream wait for it, without
  /// blocking the host. Throws std::exception on failure or timeout; the text says what the
  /// transport saw (the Work adds rank, axis, operation and unit).
  virtual void wait() = 0;
  virtual bool done() = 0;
};

/// One collective as submitted: what errors, logs and cross-rank checks call it.
struct OpInfo {
  const char* operation;  ///< static storage: "all_gather", ...
  int64_t elements;       ///< of the whole buffer: gather output, scatter input, reduced buffer
  at::ScalarType dtype;
  std::string_view unit;  ///< FSDP unit or "" ; lives for the call only
  /// Equal on all ranks iff operation, elements, dtype, unit, position and what else must agree (root, reduction and
  /// scale, counts) do.
  uint64_t tag;
  std::string what;  ///< rank, operation, elements, dtype, unit, axis and members, for errors
};
}  // namespace detail

/// Handle to a submitted collective. Default constructed: a finished one. Copies share the state.
/// The operation's inputs must not be written, nor its outputs read, before wait().
class Work {
 public:
  Work() = default;
  Work(std::shared_ptr<detail::WorkImpl> impl, std::string what, std::shared_ptr<detail::CommFailure> failure);

  /// "Later work on my stream (CUDA) or thread (CPU) sees the result." Throws CommError naming rank,
  /// axis, operation and unit when the operation failed or timed out, and the job's first failure where
  /// another process has one; waiting again throws again.
  void wait();
  /// True when wait() would not block. Never throws.
  bool done() const;

 private:
  std::shared_ptr<detail::WorkImpl> impl_;
  std::string what_;
  std::shared_ptr<detail::CommFailure> failure_;
};

/// Elements per rank, known to all ranks; zeros allowed. Empty: equal parts.
using Counts = std::span<const int64_t>;

/// Collectives among the ranks of one mesh axis. Operations are submitted in the same order on all
/// ranks, from one thread at a time, and run in that order. Tensors are contiguous, one-dimensional
/// and on device(). No operation waits longer than timeout(), counted from when it starts to run. After a
/// failure every later operation is refused at once with a CommError that names the first failed one.
/// Integers are summed, not averaged or scaled: ValueError.
///
/// The public functions check arguments, log, and skip communication on one rank; the transports
/// (gloo, shared memory, NCCL, fake) implement the protected do_ functions only.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  c10::Device device() const { return device_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  /// Axis name(s) as given to the mesh.
  const std::string& axes() const { return axes_; }
  /// The members' ranks in the world, in this communicator's order. Errors name ranks by these.
  const std::vector<int64_t>& world_ranks() const { return world_ranks_; }
  /// "gloo", "shm", "nccl", "fake".
  virtual std::string_view backend() const = 0;

  /// out = concatenation over ranks of in, counts[r] elements from rank r. `in` may be its own part
  /// of `out`. Any dtype.
  Work all_gather(const at::Tensor& out, const at::Tensor& in, Counts counts = {}, std::string_view unit = {});
  /// out = part rank() (counts[rank()] elements) of scale * (sum over ranks of in). Low-precision
  /// inputs are summed in fp32, in an order that does not depend on timing. `out` may be its own
  /// part of `in`; `in` is otherwise unchanged.
  Work reduce_scatter(const at::Tensor& out, const at::Tensor& in, double scale = 1.0, Counts counts = {},
                      std::string_view unit = {});
  /// In place. kSum and kAvg multiply by scale; kMin and kMax take scale 1 only.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum, double scale = 1.0,
                  std::string_view unit = {});
  Work broadcast(const at::Tensor& tensor, int64_t root, std::string_view unit = {});
  /// in is cut by in_counts (part r goes to rank r), out by out_counts (part r comes from rank r).
  Work all_to_all(const at::Tensor& out, const at::Tensor& in, Counts out_counts, Counts in_counts,
                  std::string_view unit = {});
  /// Returns when all ranks have arrived. Not logged.
  void barrier();

  /// Ranks that give the same color form a new communicator, ordered by (key, rank). Collective. Inherits
  /// set_control(); CommError, naming the missing ranks, when they do not all come within the timeout.
  std::shared_ptr<Communicator> split(int64_t color, int64_t key, std::string axes);

  /// Operations submitted between these are issued as one where the transport can (NCCL). Their Work
  /// may be waited for only after group_end(). Balanced by CommGroup below.
  virtual void group_start() {}
  virtual void group_end() {}

  /// Traffic of this communicator is control, not data: it is not logged.
  void set_control() { control_ = true; }

  /// Uninitialised buffer the transport reaches without copying through its own memory.
  virtual at::Tensor empty(int64_t elements, at::ScalarType dtype);

  /// Fails all pending and later operations, here and (as soon as the transport can tell) at the
  /// peers. Callable from any thread, more than once. Never blocks.
  virtual void abort() noexcept = 0;
  /// abort(), with what later errors of this communicator say.
  void fail(const std::string& why) noexcept;

  /// For make_communicator: the members' world ranks.
  void set_world_ranks(std::vector<int64_t> ranks);

 protected:
  Communicator(int64_t rank, int64_t size, c10::Device device, std::string axes, std::chrono::milliseconds timeout,
               std::shared_ptr<detail::CommTrace> trace);

  using WorkPtr = std::shared_ptr<detail::WorkImpl>;
  // Arguments are valid, size() > 1, and counts are never empty.
  virtual WorkPtr do_all_gather(const at::Tensor& out, const at::Tensor& in, Counts, const detail::OpInfo&) = 0;
  virtual WorkPtr do_reduce_scatter(const at::Tensor& out, const at::Tensor& in, double scale, Counts,
                                    const detail::OpInfo&) = 0;
  virtual WorkPtr do_all_reduce(const at::Tensor&, ReduceOp, double scale, const detail::OpInfo&) = 0;
  virtual WorkPtr do_broadcast(const at::Tensor&, int64_t root, const detail::OpInfo&) = 0;
  virtual WorkPtr do_all_to_all(const at::Tensor& out, const at::Tensor& in, Counts out_counts, Counts in_counts,
                                const detail::OpInfo&) = 0;
  virtual WorkPtr do_barrier(const detail::OpInfo&) = 0;
  virtual std::shared_ptr<Communicator> do_split(int64_t color, int64_t key, std::string axes) = 0;

  const std::shared_ptr<detail::CommTrace>& trace() const { return trace_; }
  /// A transport records here why it stops, so that later operations say so. The first record stays.
  const std::shared_ptr<detail::CommFailure>& failure() const { return failure_; }
  /// What errors call a member: its world rank.
  int64_t world_rank(int64_t r) const { return world_ranks_[static_cast<size_t>(r)]; }

 private:
  struct Detail;
  detail::OpInfo begin(const char* operation, int64_t elements, at::ScalarType dtype, std::string_view unit,
                       const Detail& detail);
  Work submitted(WorkPtr work, detail::OpInfo info) const;
  std::string describe(const char* operation, int64_t elements, at::ScalarType dtype, std::string_view unit) const;
  void check_usable(const std::string& what) const;
  void check_ranks(const detail::OpInfo& info, const Detail& detail, uint64_t position);

  int64_t rank_, size_;
  c10::Device device_;
  std::string axes_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<detail::CommTrace> trace_;
  std::shared_ptr<detail::CommFailure> failure_;
  std::vector<int64_t> world_ranks_;
  std::string where_;  // axis and members, for errors
  uint64_t sequence_ = 0;
  bool control_ = false;
};

/// Scope of a grouped launch; ends the group also when an exception passes.
class CommGroup {
 public:
  explicit CommGroup(Communicator& comm) : comm_(comm) { comm_.group_start(); }
  ~CommGroup() noexcept(false);
  CommGroup(const CommGroup&) = delete;
  CommGroup& operator=(const CommGroup&) = delete;

 private:
  Communicator& comm_;
};

}  // namespace fsdp
