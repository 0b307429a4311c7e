#include <algorithm>

#include "plan/memory.h"

namespace fsdp::plan {

AtRest at_rest(const Plan& plan, int64_t rank) {
  const auto& o = plan.options;
  AtRest bytes;
  for (const auto& unit : plan.units)
    for (const auto& g : unit.groups) {
      const auto owned = local_segments(o.mesh, g.optimizer, rank);
      const auto main = local_range(o.mesh, g.optimizer, g.layout, rank).size() * bytes_of(g.main);
      const auto model = local_range(o.mesh, g.parameter, g.layout, rank).size() * bytes_of(g.compute);
      bytes.main_weights += unit.count * main;
      bytes.model_weights += unit.count * model;
      bytes.weights += unit.count * (g.one_memory() ? std::max(main, model) : main + model);
      if (!g.trainable) continue;
      bytes.gradients += unit.count * local_range(o.mesh, g.optimizer, g.layout, rank).size() * bytes_of(g.grad);
      const auto rows = g.payload_before[owned.first + owned.count] - g.payload_before[owned.first];
      bytes.optimizer_state += unit.count * o.optimizer_state * rows * bytes_of(g.main);
    }
  return bytes;
}

int64_t largest_rank(const Plan& plan) {
  int64_t best = 0, most = -1;
  for (int64_t rank = 0; rank < plan.options.mesh.size(); ++rank)
    if (const auto bytes = at_rest(plan, rank).total(); bytes > most) {
      most = bytes;
      best = rank;
    }
  return best;
}

}  // namespace fsdp::plan
