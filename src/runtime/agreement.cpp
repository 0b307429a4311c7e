#include <algorithm>
#include <sstream>

#include <fmt/format.h>

#include "runtime/context_state.h"
#include "runtime/texts.h"
#include "runtime/unit.h"

namespace fsdp::detail {
namespace {

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) result.push_back(line);
  return result;
}

/// The texts differ: exchange them and say where.
[[noreturn]] void report_difference(Communicator& comm, const std::string& mine) {
  const auto texts = exchange_texts(comm, mine);
  const auto first = lines(texts[0]);
  for (int64_t rank = 1; rank < comm.size(); ++rank) {
    const auto other = lines(texts[static_cast<size_t>(rank)]);
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const auto a = i < first.size() ? first[i] : "(nothing)", b = i < other.size() ? other[i] : "(nothing)";
      if (a != b)
        throw StateError(
            fmt::format("ranks of mesh axis '{}' built different models; the first difference: rank 0 has {}, "
                        "rank {} has {}. Build the model, seed and load it the same on every rank before "
                        "fully_shard",
                        comm.axes(), a, rank, b));
    }
  }
  throw StateError(fmt::format("ranks of mesh axis '{}' built different models", comm.axes()));
}

}  // namespace

void ContextState::check_ranks_agree() {
  std::vector<std::pair<DeviceMesh, std::string>> meshes;
  for (auto* unit : forward) {
    auto it = std::find_if(meshes.begin(), meshes.end(), [&](const auto& m) { return m.first == *unit->mesh; });
    if (it == meshes.end()) it = meshes.insert(meshes.end(), {*unit->mesh, ""});
    it->second += fmt::format("unit '{}' ({})\n{}", unit->name, unit->local_name, unit->signature);
  }
  for (auto& [mesh, text] : meshes) {
    if (mesh.size() == 1) continue;
    auto& comm = mesh.communicator_all(Channel::kControl);
    if (comm.backend() == "fake") continue;  // nothing comes from the other ranks
    if (!same_everywhere(comm, text)) report_difference(comm, text);
  }
}

}  // namespace fsdp::detail
