#pragma once

#include <memory>
#include <string>
#include <vector>

#include <fsdp/dbuffer.h>

namespace fsdp {

namespace detail {
class Group;
}

/// Parameters of one unit that share dtype and requires_grad, in one flat buffer; several groups have them where that
/// saves padding (plan_buffers). A read-only view for tests and tools; owned by its unit.
class ParameterGroup {
 public:
  explicit ParameterGroup(const detail::Group& group) : group_(&group) {}

  /// The optimizer's weights (optimizer placement, main dtype). The parameters at rest are views of it.
  const DBuffer& main_weight() const;
  /// Compute weights between forwards (parameter placement, compute dtype). Shares memory with main_weight when the
  /// dtypes agree. Up to date only after a forward.
  const DBuffer& model_weight() const;
  /// Reduced gradients (optimizer placement, gradient dtype); `.grad()` of the parameters at rest are views of it.
  /// StateError for a frozen group, which has none.
  const DBuffer& main_grad() const;
  bool has_main_grad() const { return requires_grad(); }

  /// First name of each parameter, relative to the unit.
  const std::vector<std::string>& fqns() const;
  /// Every name of parameter `index` (a tied weight has several).
  const std::vector<std::string>& aliases(int64_t index) const;
  /// Compute dtype.
  at::ScalarType dtype() const;
  bool requires_grad() const;
  /// Bytes of full weights gathered now.
  int64_t full_bytes() const;
  /// Bytes this rank holds for the group between steps: weights, compute weights where they are separate, gradients.
  int64_t persistent_bytes() const;
  /// Layout, placements, and every collective of a step with its bytes, one per line.
  std::string describe() const;

 private:
  const detail::Group* group_;
};

}  // namespace fsdp
