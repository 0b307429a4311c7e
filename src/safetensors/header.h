#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fsdp/layout.h>

/// The safetensors format, without LibTorch: 8 bytes with the length of a JSON header, the header, and the tensors'
/// bytes, row-major.
namespace fsdp::safetensors {

/// What is wrong with a file: its path comes first.
class FormatError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Entry {
  std::string name;
  std::string dtype;  // as the format spells it: "F32"
  Shape shape;
  int64_t offset = 0;  // in bytes, from the beginning of the file
  int64_t bytes = 0;
};

using Metadata = std::vector<std::pair<std::string, std::string>>;

struct Header {
  std::vector<Entry> entries;
  Metadata metadata;
};

/// Bytes of an element; 0 for a dtype that this library does not know.
int64_t element_size(std::string_view dtype);

/// The beginning of a file with these tensors, of known dtypes; sets their offsets and bytes.
std::string layout(std::span<Entry> entries, const Metadata& metadata);

/// FormatError, naming the tensor where it is one, for anything else than a header. Does not look at what follows.
Header read_header(const std::filesystem::path& file);

/// FormatError naming a tensor that has not the bytes its shape needs, or that the file does not hold whole.
void check_tensors(const Header& header, const std::filesystem::path& file);

}  // namespace fsdp::safetensors
