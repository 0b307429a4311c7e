#pragma once

#include <cstdint>
#include <vector>

#include "plan/memory.h"
#include "plan/traffic.h"

namespace fsdp::plan {

/// All that is said of one rank.
struct Figures {
  int64_t rank = 0;
  AtRest rest;
  Peak peak;
  std::vector<Traffic> traffic;

  /// Bytes at rest and the transient peak together; activations come on top.
  int64_t total() const { return rest.total() + peak.at.total(); }
};

/// ValueError for a rank outside the mesh.
Figures figures(const Plan&, int64_t rank);

}  // namespace fsdp::plan
