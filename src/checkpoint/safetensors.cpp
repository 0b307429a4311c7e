#include "checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "json/json.h"
#include "json/text.h"

namespace fsdp::detail::safetensors {
namespace {

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {{"F64", at::kDouble},
                                                              {"F32", at::kFloat},
                                                              {"F16", at::kHalf},
                                                              {"BF16", at::kBFloat16},
                                                              {"I64", at::kLong},
                                                              {"I32", at::kInt},
                                                              {"I16", at::kShort},
                                                              {"I8", at::kChar},
                                                              {"U8", at::kByte},
                                                              {"BOOL", at::kBool},
                                                              {"F8_E4M3", at::kFloat8_e4m3fn},
                                                              {"F8_E5M2", at::kFloat8_e5m2},
                                                              {"C64", at::kComplexFloat}};

constexpr int64_t kPrefix = 8;  // bytes that hold the header's length

int64_t number_of(const Shape& shape) {
  int64_t n = 1;
  for (auto s : shape)
    if (s < 0 || __builtin_mul_overflow(n, s, &n)) return -1;
  return n;
}

}  // namespace

int64_t Entry::bytes() const { return number_of(shape) * static_cast<int64_t>(c10::elementSize(dtype)); }

std::string_view dtype_name(at::ScalarType dtype) {
  for (const auto& [name, type] : kDtypes)
    if (type == dtype) return name;
  throw CheckpointError(fmt::format("safetensors files cannot hold tensors of dtype {}", c10::toString(dtype)));
}

at::ScalarType dtype_named(std::string_view name) {
  for (const auto& [known, type] : kDtypes)
    if (name == known) return type;
  throw json::Error(fmt::format("tensors of dtype {} are not supported", name));
}

std::string layout(std::span<Entry> entries, const Metadata& metadata) {
  std::string json = "{";
  if (!metadata.empty()) {
    json += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata)
      json += fmt::format("{}{}:{}", json.back() == '{' ? "" : ",", json::quoted(key), json::quoted(value));
    json += "}";
  }
  // Readers want each tensor at a multiple of its element's size: the large elements come first.
  std::vector<size_t> order(entries.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return c10::elementSize(entries[a].dtype) > c10::elementSize(entries[b].dtype);
  });
  int64_t at = 0;
  for (auto i : order) {
    auto& e = entries[i];
    e.offset = at;
    at += e.bytes();
    json +=
        fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", json.size() == 1 ? "" : ",",
                    json::quoted(e.name), dtype_name(e.dtype), fmt::join(e.shape, ","), e.offset, at);
  }
  json += "}";
  json.resize((json.size() + kPrefix - 1) / kPrefix * kPrefix, ' ');  // the data begins at a multiple of 8
  for (auto& e : entries) e.offset += kPrefix + static_cast<int64_t>(json.size());
  std::string text(kPrefix, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return text + json;
}

Header read_header(const File& file) {
  auto fail = [&](const std::string& why) { throw CheckpointError(fmt::format("{}: {}", file.path().string(), why)); };
  const auto size = file.size();
  std::array<unsigned char, kPrefix> prefix{};
  if (size < kPrefix) fail(fmt::format("expected a safetensors file, got {} bytes", size));
  file.read(prefix.data(), kPrefix, 0);
  uint64_t length = 0;
  for (size_t i = prefix.size(); i-- > 0;) length = length << 8 | prefix[i];
  if (length > static_cast<uint64_t>(size - kPrefix))
    fail(fmt::format("is no safetensors file, or is cut short: its header should have {} bytes, and {} follow", length,
                     size - kPrefix));
  std::string text(length, '\0');
  file.read(text.data(), static_cast<int64_t>(length), kPrefix);
  const int64_t data = kPrefix + static_cast<int64_t>(length);
  Header header;
  try {
    const auto document = json::parse(text);
    for (const auto& [name, value] : document.as_object()) {
      if (name == "__metadata__") {
        for (const auto& [key, v] : value.as_object()) header.metadata.emplace_back(key, v.as_string());
        continue;
      }
      Entry entry{name, dtype_named(value.at("dtype").as_string()), value.at("shape").as_ints(), 0};
      const auto range = value.at("data_offsets").as_ints();
      if (number_of(entry.shape) < 0 || range.size() != 2 || range[0] < 0 || range[1] - range[0] != entry.bytes())
        fail(fmt::format("tensor '{}': its shape [{}] and its place [{}] do not agree", name,
                         fmt::join(entry.shape, ", "), fmt::join(range, ", ")));
      if (range[1] > size - data)
        fail(fmt::format("is cut short: tensor '{}' should end at byte {}, the file has {}", name, data + range[1],
                         size));
      entry.offset = data + range[0];
      header.entries.push_back(std::move(entry));
    }
  } catch (const json::Error& e) {
    fail(fmt::format("its header: {}", e.what()));
  }
  return header;
}

}  // namespace fsdp::detail::safetensors
