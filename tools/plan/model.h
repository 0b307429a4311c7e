#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fsdp/layout.h>

#include "plan/dtype.h"

namespace fsdp::plan {

struct Tensor {
  std::string name;
  Shape shape = {};
  Dtype dtype = Dtype::kFloat32;
};

/// Parameters that one fully_shard call takes, and how often the model has such a unit.
struct Unit {
  std::string name;
  int64_t count = 1;
  /// Lies around all others and uses its parameters first and last (an embedding that is the head too): gathered
  /// through all of forward and all of backward.
  bool root = false;
  bool frozen = false;  ///< requires_grad is false
  std::vector<Tensor> tensors = {};
};

/// Units in the order of forward; a root first.
struct Model {
  std::string name;
  std::vector<Unit> units = {};
  std::vector<std::string> notes = {};  ///< what a reader left out, for the report
};

/// ValueError naming the unit (and tensor): no units or more than 100,000, a unit without tensors, a count below 1, a
/// shape with a negative dimension or beyond 64 bits, a root that is not first or occurs more than once, two tensors of
/// one name in a unit.
void check(const Model&);

/// The shape as the planner sees it: a scalar is one row, and a tensor without elements has no rows.
Shape planned_shape(const Shape&);
/// Elements. ValueError on overflow.
int64_t numel(const Shape&);
/// Units, each as often as it occurs.
int64_t instances(const Model&);

}  // namespace fsdp::plan
