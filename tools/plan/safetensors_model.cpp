#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <fstream>
#include <map>
#include <tuple>

#include <fsdp/error.h>

#include "json/json.h"
#include "plan/model_readers.h"

namespace fsdp::plan {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& file, const std::string& why) { throw ValueError(file.string() + ": " + why); }

/// A safetensors file begins with the length of its JSON header: 8 bytes, little endian.
std::string read_header(const fs::path& file) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  if (!in) fail(file, "cannot be read");
  const auto size = static_cast<uint64_t>(in.tellg());
  std::array<unsigned char, 8> prefix{};
  in.seekg(0);
  if (size < prefix.size() || !in.read(reinterpret_cast<char*>(prefix.data()), prefix.size()))
    fail(file,
         "is no safetensors file: it has " + std::to_string(size) + " bytes, fewer than the 8 of a header's length");
  uint64_t length = 0;
  for (size_t i = prefix.size(); i-- > 0;) length = length << 8 | prefix[i];
  if (length > size - prefix.size())
    fail(file, "is no safetensors file, or is cut short: its header should have " + std::to_string(length) +
                   " bytes, and " + std::to_string(size - prefix.size()) + " follow");
  std::string header(length, '\0');
  if (!in.read(header.data(), static_cast<std::streamsize>(length))) fail(file, "cannot be read");
  return header;
}

/// "model.layers.12.mlp.weight": the unit is "model.layers.12"; number -1 and no name where there is no number.
struct UnitKey {
  std::string prefix;
  int64_t number = -1;
  bool operator<(const UnitKey& other) const { return std::tie(prefix, number) < std::tie(other.prefix, other.number); }
};

UnitKey unit_of(const std::string& name) {
  for (size_t begin = 0; begin < name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    int64_t number = 0;
    const auto [stop, error] = std::from_chars(name.data() + begin, name.data() + end, number);
    if (error == std::errc() && stop == name.data() + end && number >= 0) return {name.substr(0, begin), number};
    begin = end + 1;
  }
  return {};
}

bool holds_integers(const std::string& dtype) {
  return dtype == "BOOL" || (!dtype.empty() && (dtype[0] == 'I' || dtype[0] == 'U'));
}

struct Reader {
  std::optional<Dtype> dtype;
  std::map<UnitKey, Unit> units;
  std::map<std::string, fs::path> seen;
  std::vector<std::string> notes;

  void add(const fs::path& file, const std::string& name, const json::Value& entry) {
    Tensor tensor{.name = name};
    std::string stored;
    try {
      stored = entry.at("dtype").as_string();
      tensor.shape = entry.at("shape").as_ints();
    } catch (const json::Error& e) {
      fail(file, "tensor \"" + name + "\": " + e.what());
    }
    if (const auto [it, fresh] = seen.emplace(name, file); !fresh)
      fail(file, "tensor \"" + name + "\" is in " + it->second.string() + " too");
    if (holds_integers(stored)) {
      notes.push_back("left out: " + name + ", " + stored + " (integers are no parameters)");
      return;
    }
    const auto own = dtype_named(stored);
    if (!own && !dtype)
      fail(file, "tensor \"" + name + "\" has dtype " + stored +
                     ", which cannot be trained; give --dtype to plan the model in another one");
    tensor.dtype = dtype.value_or(own.value_or(Dtype::kFloat32));
    const auto key = unit_of(name);
    auto& unit = units[key];
    unit.root = key.number < 0;
    unit.name = unit.root ? "root" : key.prefix + std::to_string(key.number);
    if (!unit.root) tensor.name = name.substr(unit.name.size() + (name.size() > unit.name.size()));
    unit.tensors.push_back(std::move(tensor));
  }
};

bool alike(const Unit& a, const Unit& b) {
  return !a.root && !b.root &&
         std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                    [](const Tensor& x, const Tensor& y) { return x.shape == y.shape && x.dtype == y.dtype; });
}

}  // namespace

Model safetensors_model(std::span<const fs::path> files, std::optional<Dtype> dtype) {
  if (files.empty()) throw ValueError("expected at least one safetensors file");
  Reader reader{.dtype = dtype, .units = {}, .seen = {}, .notes = {}};
  for (const auto& file : files) {
    json::Value header;
    try {
      header = json::parse(read_header(file));
    } catch (const json::Error& e) {
      fail(file, std::string("its header: ") + e.what());
    }
    if (!std::holds_alternative<json::Value::Object>(header.data())) fail(file, "its header: expected an object");
    for (const auto& [name, entry] : header.as_object())
      if (name != "__metadata__") reader.add(file, name, entry);
  }
  Model model{files.front().filename().string(), {}, std::move(reader.notes)};
  for (auto& [key, unit] : reader.units) {
    // Equal neighbours ("layers.0", "layers.1", ...) are planned once.
    if (!model.units.empty() && alike(model.units.back(), unit))
      ++model.units.back().count;
    else
      model.units.push_back(std::move(unit));
  }
  check(model);
  return model;
}

}  // namespace fsdp::plan
