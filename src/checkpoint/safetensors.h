#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

#include <fsdp/layout.h>

#include "checkpoint/file.h"

/// The safetensors format: 8 bytes with the length of a JSON header, the header, and the tensors' bytes, row-major.
namespace fsdp::detail::safetensors {

struct Entry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  Shape shape;
  int64_t offset = 0;  // in bytes: as written by layout() and read by read_header(), from the beginning of the file
  int64_t bytes() const;
};

using Metadata = std::vector<std::pair<std::string, std::string>>;

struct Header {
  std::vector<Entry> entries;
  Metadata metadata;
};

/// The format's name of a dtype: "F32". CheckpointError where it has none.
std::string_view dtype_name(at::ScalarType dtype);
/// json::Error for a name that LibTorch has no dtype for.
at::ScalarType dtype_named(std::string_view name);

/// The beginning of a file with these tensors; sets their offsets.
std::string layout(std::span<Entry> entries, const Metadata& metadata);

/// CheckpointError naming the file, and the tensor, for anything that is not a whole safetensors file. Tensors of a
/// dtype that LibTorch lacks are refused by name.
Header read_header(const File& file);

}  // namespace fsdp::detail::safetensors
