#include "checkpoint/dtypes.h"

#include <utility>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp::detail {
namespace {

constexpr std::pair<std::string_view, at::ScalarType> kNames[] = {{"F64", at::kDouble},
                                                                  {"F32", at::kFloat},
                                                                  {"F16", at::kHalf},
                                                                  {"BF16", at::kBFloat16},
                                                                  {"I64", at::kLong},
                                                                  {"I32", at::kInt},
                                                                  {"I16", at::kShort},
                                                                  {"I8", at::kChar},
                                                                  {"U64", at::kUInt64},
                                                                  {"U32", at::kUInt32},
                                                                  {"U16", at::kUInt16},
                                                                  {"U8", at::kByte},
                                                                  {"BOOL", at::kBool},
                                                                  {"C64", at::kComplexFloat},
                                                                  {"F8_E4M3", at::ScalarType::Float8_e4m3fn},
                                                                  {"F8_E5M2", at::ScalarType::Float8_e5m2}};

}  // namespace

std::string dtype_name(at::ScalarType dtype, std::string_view tensor) {
  for (const auto& [name, type] : kNames)
    if (type == dtype) return std::string(name);
  throw CheckpointError(fmt::format("'{}' has dtype {}, which cannot be stored", tensor, c10::toString(dtype)));
}

at::ScalarType dtype_named(std::string_view name) {
  for (const auto& [known, type] : kNames)
    if (name == known) return type;
  return at::ScalarType::Undefined;
}

}  // namespace fsdp::detail
