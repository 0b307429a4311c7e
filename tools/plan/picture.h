#pragma once

#include <string>

#include "plan/plan.h"

namespace fsdp::plan {

/// SVG of who owns which rows of the optimizer's weights: a chapter per distinct group of the plan, a cell per owner
/// in the order of the buffer (up to 16 owners a line each, more in a grid; beyond 1024, several owners share a cell),
/// a coloured part per tensor, grey where there is padding. Each part says rank, tensor and rows when pointed at.
std::string as_svg(const Plan&);

}  // namespace fsdp::plan
