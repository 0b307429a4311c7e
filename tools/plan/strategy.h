#pragma once

#include <string_view>

#include <fsdp/placement.h>

#include "plan/mesh.h"

namespace fsdp::plan {

/// "ddp", "zero1", "zero2" and "zero3" on a mesh of one axis, "hsdp" and "hfsdp" on two, or a triple of words for
/// weights, gradients and optimizer with a letter per axis, outer to inner: R (replicated), P (partial average, only
/// gradients) or S (sharded). "RS,PS,SS" is hfsdp. ValueError that says which names fit the mesh.
Placements parse_strategy(std::string_view text, const Mesh&);

}  // namespace fsdp::plan
