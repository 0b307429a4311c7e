#include "plan/figures.h"

#include <string>

#include <fsdp/error.h>

namespace fsdp::plan {

Figures figures(const Plan& plan, int64_t rank) {
  const auto ranks = plan.options.mesh.size();
  if (rank < 0 || rank >= ranks)
    throw ValueError("rank: expected 0 to " + std::to_string(ranks - 1) + ", got " + std::to_string(rank));
  return {rank, at_rest(plan, rank), transient_peak(plan, rank), traffic(plan, rank)};
}

}  // namespace fsdp::plan
