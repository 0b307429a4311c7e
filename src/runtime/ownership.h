#pragma once

#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include "runtime/parameter.h"

namespace fsdp::detail {

struct ContextState;
struct Unit;

/// What a new unit over a module would own.
struct Ownership {
  std::vector<std::vector<ParameterInfo>> groups;  // by (dtype, requires_grad), in order of first appearance
  std::vector<std::shared_ptr<Unit>> lenders;      // units that own weights tied into this module
};

/// Direct parameters first, then those of descendants that no unit owns, depth first in registration order; units are
/// skipped with everything under them, and so are the `ignored` parameters. A weight registered under several names is
/// one parameter. ValueError naming the parameter or unit: a unit of another context below or lending, a dtype that
/// cannot be trained, a parameter that is not a leaf or holds a gradient. Changes nothing.
Ownership collect_ownership(torch::nn::Module& module, const ContextState& context,
                            const std::vector<at::Tensor>& ignored = {});

}  // namespace fsdp::detail
