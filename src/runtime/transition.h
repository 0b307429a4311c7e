#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/dbuffer.h>
#include <fsdp/distributed/device_mesh.h>
#include <fsdp/layout.h>
#include <fsdp/placement.h>

#include "layout/transition_plan.h"

namespace fsdp::detail {

/// Throws ValueError unless `placements` can describe one buffer on `mesh`.
void check_buffer_placements(const DeviceMesh& mesh, const std::vector<Placement>& placements);

/// The range a rank holds under `placements`, in elements of the global buffer. `layout` has mesh.size() segments.
ElementRange local_range(const DeviceMesh& mesh, const std::vector<Placement>& placements, const GlobalLayout& layout);

/// True where both are cut the same way, so that every rank's ranges are equal. One rank's ranges may be equal by
/// chance (it owns everything, or nothing), so what ranks must decide alike is never decided by them.
bool same_shards(const DeviceMesh& mesh, const std::vector<Placement>& a, const std::vector<Placement>& b);

/// How a buffer gets from one list of placements to another, as plan_transition says for this mesh.
struct TransitionPlan {
  TransitionPlan(const DeviceMesh& mesh, const std::vector<Placement>& from, const std::vector<Placement>& to);
  std::vector<TransitionStep> steps;
  bool communicates() const;
  bool reduces() const;
};

/// Carries out a plan for one buffer. start() submits the first collective, finish() waits and does the rest; both
/// are collective. Holds the tensors it works on.
class TransitionRun {
 public:
  struct Arguments {
    DeviceMesh mesh;
    const TransitionPlan* plan;  ///< outlives the run
    std::shared_ptr<const GlobalLayout> layout;
    at::Tensor source;  ///< flat, covering `range`
    ElementRange range;
    at::Tensor destination = {};  ///< optional: flat, covering `destination_range`; the result is left there
    ElementRange destination_range = {};
    bool consume = false;  ///< the source may be overwritten
    double scale = 1.0;    ///< applied by the first reduction; ValueError when there is none and it is not 1
    Channel channel = Channel::kDefault;
    std::string unit = {};
  };

  explicit TransitionRun(Arguments arguments);
  void start();
  void finish();
  /// After finish(): this rank's range under the final placements.
  at::Tensor result() const { return current_; }

 private:
  Work submit(const TransitionStep& step);
  at::Tensor room_for(const ElementRange& range) const;

  Arguments a_;
  at::Tensor current_;
  ElementRange range_;
  size_t next_ = 0;
  bool owned_, scaled_ = false;
  Work pending_;
};

/// One line per collective: operation, axis, elements and bytes as the collective log counts them.
std::string describe(const TransitionPlan& plan, const DeviceMesh& mesh, const std::vector<Placement>& from,
                     const GlobalLayout& layout, at::ScalarType dtype);

}  // namespace fsdp::detail
