#include <ATen/core/Tensor.h>

#include "distributed/backend.h"

namespace fsdp::detail {
namespace {

/// Moves nothing: what a rank would receive stays as it was. For planning and for stepping one rank of a large world on
/// one machine, where only counts and bytes matter; and for axes of one rank, where there is nothing to move.
class FakeCommunicator final : public Communicator {
 public:
  explicit FakeCommunicator(CommSetup s)
      : Communicator(s.rank, s.size, s.device, std::move(s.axes), s.timeout, std::move(s.trace)) {}

  std::string_view backend() const override { return "fake"; }
  void abort() noexcept override {}

 protected:
  WorkPtr do_all_gather(const at::Tensor&, const at::Tensor&, Counts, const OpInfo&) override { return nullptr; }
  WorkPtr do_reduce_scatter(const at::Tensor&, const at::Tensor&, double, Counts, const OpInfo&) override {
    return nullptr;
  }
  WorkPtr do_all_reduce(const at::Tensor&, ReduceOp, double, const OpInfo&) override { return nullptr; }
  WorkPtr do_broadcast(const at::Tensor&, int64_t, const OpInfo&) override { return nullptr; }
  WorkPtr do_all_to_all(const at::Tensor&, const at::Tensor&, Counts, Counts, const OpInfo&) override {
    return nullptr;
  }
  WorkPtr do_barrier(const OpInfo&) override { return nullptr; }
  std::shared_ptr<Communicator> do_split(int64_t, int64_t, std::string axes) override {
    if (size() > 1) throw ValueError("a fake communicator does not know the other ranks' colors and cannot be split");
    return make_communicator(
        "fake", {nullptr, 0, 1, device(), std::move(axes), timeout(), trace(), /*single_host=*/true, world_ranks()});
  }
};

}  // namespace

std::shared_ptr<Communicator> make_fake_communicator(CommSetup setup) {
  return std::make_shared<FakeCommunicator>(std::move(setup));
}

}  // namespace fsdp::detail
