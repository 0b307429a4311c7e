#include "plan/model.h"

#include <algorithm>
#include <unordered_set>

#include <fsdp/error.h>
#include <fsdp/owner_plan.h>

namespace fsdp::plan {
namespace {

// Far beyond any model, and small enough that bytes of a step, too, fit in 64 bits.
constexpr int64_t kMostInstances = 100'000;

int64_t checked_numel(const Tensor& t, const std::string& where) {
  try {
    return numel(t.shape);
  } catch (const ValueError&) {
    throw ValueError(where + ", tensor \"" + t.name + "\": its elements do not fit in 64 bits");
  }
}

}  // namespace

void check(const Model& model) {
  if (model.units.empty()) throw ValueError("model \"" + model.name + "\": expected at least one unit");
  for (size_t i = 0; i < model.units.size(); ++i) {
    const auto& unit = model.units[i];
    const auto where = "model \"" + model.name + "\", unit \"" + unit.name + "\"";
    if (unit.count < 1 || unit.count > kMostInstances)
      throw ValueError(where + ": expected a count of 1 to " + std::to_string(kMostInstances) + ", got " +
                       std::to_string(unit.count));
    if (unit.tensors.empty()) throw ValueError(where + ": expected at least one tensor");
    if (unit.root && (i > 0 || unit.count > 1))
      throw ValueError(where + ": a root lies around all other units, so it is the first and the only one");
    std::unordered_set<std::string> names;
    for (const auto& t : unit.tensors) {
      if (!names.insert(t.name).second) throw ValueError(where + ": two tensors are called \"" + t.name + "\"");
      for (size_t d = 0; d < t.shape.size(); ++d)
        if (t.shape[d] < 0)
          throw ValueError(where + ", tensor \"" + t.name + "\": dimension " + std::to_string(d) + " is " +
                           std::to_string(t.shape[d]) + "; expected at least 0");
      checked_numel(t, where);
    }
  }
  if (instances(model) > kMostInstances)
    throw ValueError("model \"" + model.name + "\": expected at most " + std::to_string(kMostInstances) +
                     " units, got " + std::to_string(instances(model)));
}

Shape planned_shape(const Shape& shape) {
  if (shape.empty()) return {1};
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return {0};
  return shape;
}

int64_t numel(const Shape& shape) { return element_cost(shape); }

int64_t instances(const Model& model) {
  int64_t n = 0;
  for (const auto& unit : model.units) n += unit.count;
  return n;
}

}  // namespace fsdp::plan
