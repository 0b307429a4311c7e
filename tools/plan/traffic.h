#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace fsdp::plan {

/// Data collectives of one kind over one axis in one step of one rank.
struct Traffic {
  int64_t axis = 0;
  std::string operation;  ///< as fsdp::CollectiveLog names it
  Dtype dtype = Dtype::kFloat32;
  int64_t calls = 0;
  int64_t elements = 0;  ///< of the whole buffers, as fsdp::CollectiveLog counts them
  int64_t bytes = 0;     ///< of these elements
  int64_t sent = 0;      ///< bytes that a rank sends when they run in a ring
};

/// A step after the first: weights are brought up to date once, gathered for each forward and backward, and gradients
/// reduced. By axis, operation and dtype, in that order. Without what an optimizer or clipping adds.
std::vector<Traffic> traffic(const Plan&, int64_t rank);

struct TrafficSum {
  int64_t calls = 0, bytes = 0, sent = 0;
};
TrafficSum sum(const std::vector<Traffic>&);

}  // namespace fsdp::plan
