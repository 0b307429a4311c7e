#include "safetensors/header.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <numeric>

#include "json/json.h"
#include "json/text.h"

namespace fsdp::safetensors {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPrefix = 8;  // bytes that hold the header's length

constexpr std::pair<std::string_view, int64_t> kSizes[] = {
    {"F64", 8},  {"I64", 8}, {"C64", 8}, {"U64", 8}, {"F32", 4}, {"I32", 4},  {"U32", 4},     {"F16", 2},
    {"BF16", 2}, {"I16", 2}, {"U16", 2}, {"I8", 1},  {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};

[[noreturn]] void fail(const fs::path& file, const std::string& why) { throw FormatError(file.string() + ": " + why); }

std::string joined(const std::vector<int64_t>& numbers) {
  std::string text;
  for (auto n : numbers) {
    if (!text.empty()) text += ',';
    text += std::to_string(n);
  }
  return text;
}

/// Writes the members of a JSON object one after the other.
void add_member(std::string& object, const std::string& key, const std::string& value) {
  object += object.empty() ? '{' : ',';
  object += json::quoted(key);
  object += ':';
  object += value;
}

std::string closed(std::string object) {
  if (object.empty()) object += '{';
  object += '}';
  return object;
}

std::string described(const Entry& e, int64_t begin, int64_t end) {
  std::string text = "{\"dtype\":\"";
  text += e.dtype;
  text += "\",\"shape\":[";
  text += joined(e.shape);
  text += "],\"data_offsets\":[";
  text += joined({begin, end});
  text += "]}";
  return text;
}

/// -1 for what no file can hold.
int64_t bytes_of(const Shape& shape, int64_t element) {
  int64_t n = element;
  for (auto s : shape)
    if (s < 0 || __builtin_mul_overflow(n, s, &n)) return -1;
  return n;
}

std::string read_text(std::ifstream& in, uint64_t size, const fs::path& file) {
  std::array<unsigned char, kPrefix> prefix{};
  in.seekg(0);
  if (size < kPrefix || !in.read(reinterpret_cast<char*>(prefix.data()), kPrefix))
    fail(file,
         "is no safetensors file: it has " + std::to_string(size) + " bytes, fewer than the 8 of a header's length");
  uint64_t length = 0;
  for (size_t i = prefix.size(); i-- > 0;) length = length << 8 | prefix[i];
  if (length > size - kPrefix)
    fail(file, "is no safetensors file, or is cut short: its header should have " + std::to_string(length) +
                   " bytes, and " + std::to_string(size - kPrefix) + " follow");
  std::string text(length, '\0');
  if (!in.read(text.data(), static_cast<std::streamsize>(length))) fail(file, "cannot be read");
  return text;
}

}  // namespace

int64_t element_size(std::string_view dtype) {
  for (const auto& [name, size] : kSizes)
    if (name == dtype) return size;
  return 0;
}

std::string layout(std::span<Entry> entries, const Metadata& metadata) {
  // Readers want each tensor at a multiple of its element's size: the large elements come first.
  std::vector<size_t> order(entries.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return element_size(entries[a].dtype) > element_size(entries[b].dtype); });
  std::string json;
  if (!metadata.empty()) {
    std::string texts;
    for (const auto& [key, value] : metadata) add_member(texts, key, json::quoted(value));
    add_member(json, "__metadata__", closed(std::move(texts)));
  }
  int64_t at = 0;
  for (auto i : order) {
    auto& e = entries[i];
    e.offset = at;
    e.bytes = bytes_of(e.shape, element_size(e.dtype));
    at += e.bytes;
    add_member(json, e.name, described(e, e.offset, at));
  }
  json = closed(std::move(json));
  json.resize((json.size() + kPrefix - 1) / kPrefix * kPrefix, ' ');  // the data begins at a multiple of 8
  for (auto& e : entries) e.offset += static_cast<int64_t>(kPrefix + json.size());
  std::string text(kPrefix, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return text + json;
}

Header read_header(const fs::path& file) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  if (!in) fail(file, "cannot be read");
  const auto size = static_cast<uint64_t>(in.tellg());
  const auto text = read_text(in, size, file);
  const auto data = static_cast<int64_t>(kPrefix + text.size());
  Header header;
  std::string name;  // of the tensor that is read, for errors
  try {
    const auto document = json::parse(text);
    for (const auto& [key, value] : document.as_object()) {
      if (key == "__metadata__") {
        for (const auto& [k, v] : value.as_object()) header.metadata.emplace_back(k, v.as_string());
        continue;
      }
      name = key;
      Entry entry{key, value.at("dtype").as_string(), value.at("shape").as_ints(), 0, 0};
      const auto range = value.at("data_offsets").as_ints();
      // (No file reaches the limit; with it, adding what comes before cannot overflow.)
      if (range.size() != 2 || range[0] < 0 || range[1] < range[0] || range[1] > INT64_MAX / 2)
        throw json::Error("its data_offsets are [" + joined(range) + "]");
      entry.offset = data + range[0];
      entry.bytes = range[1] - range[0];
      header.entries.push_back(std::move(entry));
    }
  } catch (const json::Error& e) {
    fail(file, (name.empty() ? "its header: " : "tensor \"" + name + "\": ") + e.what());
  }
  return header;
}

void check_tensors(const Header& header, const fs::path& file) {
  const auto size = static_cast<int64_t>(fs::file_size(file));
  for (const auto& e : header.entries) {
    const auto fail_at = [&](const std::string& why) { fail(file, "tensor \"" + e.name + "\" " + why); };
    if (const auto element = element_size(e.dtype); element > 0 && e.bytes != bytes_of(e.shape, element))
      fail_at("has " + std::to_string(e.bytes) + " bytes, which is not " + e.dtype + " of shape [" + joined(e.shape) +
              "]");
    if (e.bytes > size - e.offset)
      fail_at("should end at byte " + std::to_string(e.offset + e.bytes) + ", and the file is cut short at " +
              std::to_string(size));
  }
}

}  // namespace fsdp::safetensors
