#include <algorithm>
#include <charconv>
#include <map>
#include <tuple>

#include <fsdp/error.h>

#include "plan/model_readers.h"
#include "safetensors/header.h"

namespace fsdp::plan {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& file, const std::string& why) { throw ValueError(file.string() + ": " + why); }

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

  void add(const fs::path& file, const safetensors::Entry& entry) {
    const auto& name = entry.name;
    const auto& stored = entry.dtype;
    Tensor tensor{.name = name, .shape = entry.shape};
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
    try {
      for (const auto& entry : safetensors::read_header(file).entries) reader.add(file, entry);
    } catch (const safetensors::FormatError& e) {
      throw ValueError(e.what());
    }
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
