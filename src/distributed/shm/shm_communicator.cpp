#include <algorithm>
#include <memory>
#include <utility>

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "distributed/backend.h"
#include "distributed/comm_trace.h"
#include "distributed/shm/host.h"
#include "distributed/shm/operations.h"
#include "distributed/shm/queue.h"

namespace fsdp::detail {
namespace {

/// Ranks of one host that exchange data through memory they share; see shm/rounds.h for how.
class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(CommSetup s, const std::shared_ptr<shm::Segment>& segment, bool required)
      : Communicator(s.rank, s.size, s.device, s.axes, s.timeout, s.trace), setup_(std::move(s)), required_(required) {
    queue_ = std::make_shared<shm::Queue>(shm::Rounds(segment, rank(), setup_.ranks, timeout()), timeout(),
                                          core_plan(*segment), failure());
  }

  ~ShmCommunicator() override { queue_->close(); }

  std::string_view backend() const override { return "shm"; }

  void abort() noexcept override {
    failure()->record(fmt::format("rank {}: aborted", world_rank(rank())));
    queue_->abort(failure()->text());
  }

 protected:
  WorkPtr do_all_gather(const at::Tensor& out, const at::Tensor& in, Counts counts, const OpInfo& info) override {
    return queue_->submit(shm::all_gather(place(), out, in, counts, info), static_cast<int64_t>(out.nbytes()));
  }
  WorkPtr do_reduce_scatter(const at::Tensor& out, const at::Tensor& in, double scale, Counts counts,
                            const OpInfo& info) override {
    return queue_->submit(shm::reduce_scatter(place(), out, in, scale, counts, info),
                          static_cast<int64_t>(in.nbytes()));
  }
  WorkPtr do_all_reduce(const at::Tensor& tensor, ReduceOp op, double scale, const OpInfo& info) override {
    return queue_->submit(shm::all_reduce(place(), tensor, op, scale, info), static_cast<int64_t>(tensor.nbytes()));
  }
  WorkPtr do_broadcast(const at::Tensor& tensor, int64_t root, const OpInfo& info) override {
    return queue_->submit(shm::broadcast(place(), tensor, root, info), static_cast<int64_t>(tensor.nbytes()));
  }
  WorkPtr do_all_to_all(const at::Tensor& out, const at::Tensor& in, Counts out_counts, Counts in_counts,
                        const OpInfo& info) override {
    return queue_->submit(shm::all_to_all(place(), out, in, out_counts, in_counts, info),
                          static_cast<int64_t>(std::max(out.nbytes(), in.nbytes())));
  }
  WorkPtr do_barrier(const OpInfo& info) override { return queue_->submit(shm::barrier(info), 0); }

  std::shared_ptr<Communicator> do_split(int64_t color, int64_t key, std::string axes) override {
    return make_communicator(required_ ? "shm" : "auto", split_setup(setup_, splits_++, color, key, std::move(axes)));
  }

 private:
  shm::Place place() const { return {rank(), size()}; }

  shm::CorePlan core_plan(const shm::Segment& segment) const {
    const int64_t cores = shm::cores_of(segment), ranks = std::max(setup_.host_ranks, size());
    const bool fits = ranks <= cores;
    const bool spare = ranks * (at::get_num_threads() + 1) <= cores;
    constexpr shm::Patience kNone{0}, kShort{2000};  // 2000 pauses: 30-60 us, what falling asleep and waking costs
    return {.caller = fits ? kShort : kNone, .helper = spare ? kShort : kNone, .spare = spare};
  }

  CommSetup setup_;
  bool required_;
  std::shared_ptr<shm::Queue> queue_;
  int64_t splits_ = 0;
};

}  // namespace

std::shared_ptr<Communicator> make_shm_communicator(const CommSetup& setup, bool required) {
  if (!setup.device.is_cpu())
    throw ValueError(fmt::format("backend 'shm' moves memory of the CPU, not of {}", setup.device.str()));
  const auto joined = shm::join(setup);
  if (joined.segment) return std::make_shared<ShmCommunicator>(setup, joined.segment, required);
  if (!required) return nullptr;
  const auto text =
      fmt::format("backend 'shm' cannot connect mesh axis '{}': {}; use 'auto' or 'gloo'", setup.axes, joined.problem);
  if (!joined.one_host) throw ValueError(text);
  throw CommError(text);
}

}  // namespace fsdp::detail
