#include "plan/dtype.h"

#include <algorithm>
#include <array>
#include <cctype>

#include <fsdp/error.h>

namespace fsdp::plan {
namespace {

struct Format {
  Dtype dtype;
  int64_t bytes;
  const char* name;
  const char* brief;
  const char* safetensors;
};

constexpr std::array<Format, 4> kFormats{{{Dtype::kFloat64, 8, "float64", "fp64", "f64"},
                                          {Dtype::kFloat32, 4, "float32", "fp32", "f32"},
                                          {Dtype::kBFloat16, 2, "bfloat16", "bf16", "bf16"},
                                          {Dtype::kFloat16, 2, "float16", "fp16", "f16"}}};

const Format& format_of(Dtype dtype) { return kFormats[static_cast<size_t>(dtype)]; }

}  // namespace

int64_t bytes_of(Dtype dtype) { return format_of(dtype).bytes; }
const char* name_of(Dtype dtype) { return format_of(dtype).name; }

std::optional<Dtype> dtype_named(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const auto& f : kFormats)
    if (lower == f.name || lower == f.brief || lower == f.safetensors) return f.dtype;
  return std::nullopt;
}

Dtype parse_dtype(std::string_view text, const std::string& where) {
  if (const auto dtype = dtype_named(text)) return *dtype;
  throw ValueError(where + ": expected float64, float32, bfloat16 or float16, got \"" + std::string(text) + "\"");
}

}  // namespace fsdp::plan
