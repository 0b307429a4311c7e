#include "checkpoint/writers.h"

#include <algorithm>
#include <map>
#include <string>

#include <fmt/format.h>

namespace fsdp::detail {
namespace {

/// Ranks along the replicated axes hold the same rows. The first writes all of them: should replicas have drifted
/// apart, what is saved is one of them, and not a mixture.
bool first_replica(const Group& group) {
  const auto& placements = group.main_weight().placements();
  for (size_t i = 0; i < placements.size(); ++i)
    if (!is_sharded(placements[i]) && group.mesh().local_rank(static_cast<int64_t>(i)) > 0) return false;
  return true;
}

/// The lowest of the ranks that hold the tensor together; nothing where this rank holds it alone.
std::string party_of(const StateEntry& e) {
  if (!e.unit) return "";
  const auto ranks = e.unit->mesh->world_ranks();
  return std::to_string(*std::min_element(ranks.begin(), ranks.end()));
}

/// Whether the optimizer trains it, and has state for it; with no row here, either may be.
std::string training_of(const StateEntry& e, const OptimizerState& optimizer) {
  if (!optimizer.options.contains(e.name)) return "untrained";
  if (e.rows.begin == e.rows.end) return "trained";
  return optimizer.parameters.contains(e.name) ? "stepped" : "unstepped";
}

bool agree(const std::string& a, const std::string& b) {
  return a == b || (a == "trained" && b != "untrained") || (b == "trained" && a != "untrained");
}

struct Line {
  std::string party, training, name;
  std::string text() const { return fmt::format("{} {} {}", party, training, name); }
  static Line read(const std::string& text) {
    const auto first = text.find(' '), second = text.find(' ', first + 1);
    return {text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)};
  }
};

}  // namespace

void share_out_writing(ModuleState& state, const OptimizerState& optimizer, CollectiveCall& call) {
  // Ranks that hold one tensor together, as the shards of a unit or alone, form a party. Where several parties have a
  // tensor of one name (tensor parallelism that replicates it; or a program in which names are not unique), the party
  // with the lowest rank writes, and the others compare. A tensor that no unit owns is a party of each rank's own.
  std::vector<std::string> mine;
  for (const auto& e : state.entries) mine.push_back(Line{party_of(e), training_of(e, optimizer), e.name}.text());
  std::map<std::string, int64_t> writer;
  std::map<std::pair<std::string, std::string>, std::pair<std::string, int64_t>> training;  // and whose
  const auto lists = call.exchange(mine);
  call.step([&] {
    int64_t rank = 0;
    for (const auto& list : lists) {
      for (const auto& text : list) {
        const auto line = Line::read(text);
        const auto lowest = line.party.empty() ? rank : std::stoll(line.party);
        const auto [it, fresh] = writer.emplace(line.name, lowest);
        if (!fresh) it->second = std::min<int64_t>(it->second, lowest);
        if (line.party.empty()) continue;
        auto& [known, whose] =
            training.emplace(std::pair(line.party, line.name), std::pair(line.training, rank)).first->second;
        if (!agree(known, line.training))
          throw ValueError(
              fmt::format("'{}' is {} by the optimizer given on rank {}, and {} on rank {}; give the same "
                          "kind of optimizer, with the same parameters, on all ranks",
                          line.name, known, whose, line.training, rank));
        if (known == "trained") known = line.training, whose = rank;
      }
      ++rank;
    }
  });
  for (auto& e : state.entries) {
    const auto party = party_of(e);
    const bool party_writes = (party.empty() ? call.rank() : std::stoll(party)) == writer.at(e.name);
    const bool speaks = !e.unit || first_replica(*e.group);
    e.writes = party_writes && speaks;
    e.compares = !party_writes && speaks && e.parameter;
  }
}

}  // namespace fsdp::detail
