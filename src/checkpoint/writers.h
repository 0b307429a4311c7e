#pragma once

#include "checkpoint/collective_call.h"
#include "checkpoint/module_state.h"
#include "checkpoint/optimizer_state.h"

namespace fsdp::detail {

/// Sets who writes and who compares. Collective. ValueError where ranks that share a parameter do not all train it, or
/// have not all stepped it: some of its state would be nobody's.
void share_out_writing(ModuleState& state, const OptimizerState& optimizer, CollectiveCall& call);

}  // namespace fsdp::detail
