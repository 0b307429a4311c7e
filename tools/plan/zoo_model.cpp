#include <algorithm>
#include <cctype>

#include <fsdp/error.h>

#include "plan/model_readers.h"
#include "zoo/model_zoo.h"

namespace fsdp::plan {
namespace {

std::string plain(std::string_view name) {
  std::string s;
  for (unsigned char c : name)
    if (std::isalnum(c)) s += static_cast<char>(std::tolower(c));
  return s;
}

}  // namespace

Model zoo_model(std::string_view name, Dtype dtype) {
  std::string names;
  for (const auto& m : zoo::models()) {
    names += (names.empty() ? "" : ", ") + m.name;
    if (plain(m.name) != plain(name)) continue;
    Model model{m.name, {}, {}};
    for (const auto& u : m.units) {
      Unit unit{.name = u.name, .count = u.count, .root = u.root};
      for (size_t i = 0; i < u.shapes.size(); ++i)
        unit.tensors.push_back({"tensor " + std::to_string(i), u.shapes[i], dtype});
      model.units.push_back(std::move(unit));
    }
    return model;
  }
  throw ValueError("no model \"" + std::string(name) + "\" in the zoo; it has " + names +
                   " (a file's name ends in .json or .safetensors)");
}

}  // namespace fsdp::plan
