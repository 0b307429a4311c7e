#include "plan/strategy.h"

#include <array>
#include <string>

#include <fsdp/error.h>

namespace fsdp::plan {
namespace {

Placement placement_of(char letter, const std::string& where) {
  switch (letter) {
    case 'R':
    case 'r':
      return Replicate{};
    case 'P':
    case 'p':
      return Partial{};
    case 'S':
    case 's':
      return fsdp::Shard{};
    default:
      throw ValueError(where + ": expected R, P or S for each axis, got '" + letter + "'");
  }
}

Placements parse_triple(std::string_view text, const Mesh& mesh) {
  const std::string where = "placements \"" + std::string(text) + "\"";
  Placements p;
  for (const auto& axis : mesh.axes) p.dp_axes.emplace_back(axis);
  const std::array<std::vector<Placement>*, 3> sequences{&p.parameter, &p.gradient, &p.optimizer};
  size_t word = 0;
  for (char c : text) {
    if (c == ',') {
      ++word;
      continue;
    }
    if (word < sequences.size()) sequences[word]->push_back(placement_of(c, where));
  }
  if (word != 2)
    throw ValueError(where + ": expected three words, for weights, gradients and optimizer, as in RS,PS,SS");
  for (const auto* s : sequences)
    if (s->size() != mesh.shape.size())
      throw ValueError(where + ": expected a letter for each of the mesh's " + std::to_string(mesh.shape.size()) +
                       " axes in each word");
  return p;
}

}  // namespace

Placements parse_strategy(std::string_view text, const Mesh& mesh) {
  if (text.find(',') != std::string_view::npos) return parse_triple(text, mesh);
  const bool two = mesh.shape.size() == 2;
  if (!two) {
    if (text == "ddp") return ddp("dp");
    if (text == "zero1") return zero1("dp");
    if (text == "zero2") return zero2("dp");
    if (text == "zero3") return zero3("dp");
  } else {
    if (text == "hsdp") return hsdp("outer", "inner");
    if (text == "hfsdp") return hfsdp("outer", "inner");
  }
  throw ValueError("strategy \"" + std::string(text) + "\": " +
                   (two ? "a mesh of two axes takes hsdp, hfsdp or a triple such as RS,PS,SS"
                        : "a mesh of one axis takes ddp, zero1, zero2, zero3 or a triple such as R,P,S; hsdp and "
                          "hfsdp need two axes, as in --mesh 8x64"));
}

}  // namespace fsdp::plan
