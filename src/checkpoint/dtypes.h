#pragma once

#include <string>
#include <string_view>

#include <c10/core/ScalarType.h>

namespace fsdp::detail {

/// As safetensors spells it: "F32". CheckpointError, naming the tensor, for a dtype it has no name for.
std::string dtype_name(at::ScalarType dtype, std::string_view tensor);
/// Undefined for a name that LibTorch has no dtype for.
at::ScalarType dtype_named(std::string_view name);

}  // namespace fsdp::detail
