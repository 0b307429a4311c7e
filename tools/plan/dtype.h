#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp::plan {

/// Number formats that weights and gradients can have.
enum class Dtype { kFloat64, kFloat32, kBFloat16, kFloat16 };

int64_t bytes_of(Dtype);
/// "float32"
const char* name_of(Dtype);
/// Reads "float32", "fp32" or "F32" (as safetensors spells it), in any case; nullopt for anything else.
std::optional<Dtype> dtype_named(std::string_view text);
/// As dtype_named. ValueError beginning with `where` and listing the names for anything else.
Dtype parse_dtype(std::string_view text, const std::string& where);

}  // namespace fsdp::plan
