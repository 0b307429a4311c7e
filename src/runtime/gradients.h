#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/context.h>
#include <fsdp/dbuffer.h>

#include "runtime/parameter.h"
#include "runtime/registry.h"
#include "runtime/storage_pool.h"
#include "runtime/transition.h"

namespace fsdp::detail {

struct GroupOptions;

/// Full gradients that one backward left on a group's parameters; undefined ones count as zero.
using FullGradients = std::vector<at::Tensor>;

/// The gradients of one trainable group, from what autograd leaves on the handles to what the optimizer reads.
///
/// Every backward adds one contribution, reduced as far as the gradient placement says, to the accumulator. The last
/// microbatch reduces the accumulator to the optimizer placement and adds it to main_grad. Where the accumulator holds
/// the same range as main_grad, the two are one memory. Which tensors hold something is kept per parameter, since the
/// user may clear some gradients and not others.
class Gradients {
 public:
  /// ValueError for placements that cannot be reached.
  Gradients(const GroupOptions& options, std::shared_ptr<const GlobalLayout> layout, const std::vector<Handle>& handles,
            const std::vector<ParameterShape>& shapes, const std::vector<std::string>& names, at::ScalarType own,
            at::ScalarType compute);
  ~Gradients();
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  /// Tells operators that read an unreduced gradient which unit it belongs to.
  void register_unit(const std::weak_ptr<Unit>& unit);

  /// Takes the resting gradients off the handles, so that autograd starts from none, and notes what the user did to
  /// them: cleared, zeroed, replaced. StateError for a replacement of the wrong shape.
  void absorb_resting();
  /// Takes the full gradients off the handles. StateError naming the parameter for one of the wrong shape.
  FullGradients take_full();
  /// Puts back what is readable at rest: main_grad's rows, or a gradient that refuses to be read while it is unreduced.
  void install();
  /// As install() while a reduction is still under way: nothing may be read.
  void install_unreduced();

  /// Packs a contribution and submits its reduction; `last` reduces to the optimizer placement. finish() must come
  /// before the next start() and before the gradients are read. The gradients are released while packing.
  void start(FullGradients gradients, bool last, const std::string& unit);
  void finish();
  /// After a failure: waits for what is under way (bounded by the communicator's timeout) and forgets it if it fails.
  void abandon() noexcept;
  bool in_flight() const { return stage_ != Stage::kIdle; }

  const DBuffer& main_grad() const { return main_; }
  int64_t transient_bytes() const;
  /// The accumulator holds contributions to this parameter that are not reduced to the optimizer placement.
  bool unreduced(size_t index) const { return pending_[index]; }
  std::string describe() const;

 private:
  enum class Stage { kIdle, kContributing, kFinalizing };

  /// The rows of a parameter that lie in `range`, of which `flat` holds the elements.
  at::Tensor rows(const at::Tensor& flat, const ElementRange& range, size_t index) const;
  void zero_gaps(const at::Tensor& flat) const;
  at::Tensor accumulator();
  bool occupied(size_t index) const { return pending_[index] || (shared_ && base_[index]); }
  void pack(FullGradients gradients);
  void accumulate_whole(FullGradients gradients);
  void accumulate_reduced(const at::Tensor& reduced);
  void start_finalize();
  void end_finalize();
  at::Tensor unreduced_gradient(size_t index) const;
  void install_one(size_t index, bool refuse);

  DeviceMesh mesh_;
  std::shared_ptr<const GlobalLayout> layout_;
  const std::vector<Handle>& handles_;
  const std::vector<ParameterShape>& shapes_;
  const std::vector<std::string>& names_;
  std::shared_ptr<StoragePool> pool_;
  Channel channel_;
  at::ScalarType compute_;
  std::optional<at::ScalarType> comm_;
  double scale_;  // per contribution
  std::string unit_;

  std::vector<Placement> partial_, accumulated_;
  TransitionPlan contribute_plan_, finalize_plan_;
  ElementRange whole_, accumulated_range_;
  bool shared_;  // accumulator and main_grad are one memory
  DBuffer main_;
  PooledTensor separate_;              // the accumulator when it is not main_grad; empty between steps
  std::vector<bool> base_;             // main_grad holds a reduced gradient of this parameter
  std::vector<bool> pending_;          // the accumulator holds unreduced contributions to it
  std::vector<at::Tensor> installed_;  // what install() put on the handles
  std::vector<bool> refuses_;          // of these, the ones that refuse to be read

  PooledTensor packed_;
  std::optional<TransitionRun> reducing_;
  Stage stage_ = Stage::kIdle;
  bool finalize_next_ = false;
  at::Tensor sentinel_;  // storage of unreduced gradients
};

/// StateError naming `call` and the unit if `gradient` of a parameter of `unit` (null: of none) is not reduced yet.
void refuse_unreduced(const at::Tensor& gradient, const Unit* unit, const char* call);

}  // namespace fsdp::detail
