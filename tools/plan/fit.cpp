#include "plan/fit.h"

#include <algorithm>

#include <fsdp/error.h>

#include "plan/strategy.h"

namespace fsdp::plan {
namespace {

constexpr int64_t kMostRanks = int64_t{1} << 20;

Choice measure(const Model& model, const Options& options, const std::string& strategy) {
  const auto plan = make_plan(model, options);
  const auto f = figures(plan, largest_rank(plan));
  int64_t outer = 0;
  if (options.mesh.ndim() == 2)
    for (const auto& t : f.traffic) outer += t.axis == 0 ? t.sent : 0;
  return {strategy, options.mesh, f.total(), sum(f.traffic).sent, outer};
}

Choice try_strategy(const Model& model, Options options, const std::string& strategy, Mesh mesh) {
  options.mesh = std::move(mesh);
  options.placements = parse_strategy(strategy, options.mesh);
  return measure(model, options, strategy);
}

/// Inner axes worth a try: that of the mesh asked for, or else powers of two from the size of one machine on.
std::vector<Mesh> two_axes(const Mesh& asked) {
  if (asked.ndim() == 2) return {asked};
  std::vector<Mesh> meshes;
  for (int64_t inner = 8; inner < asked.size(); inner *= 2)
    if (asked.size() % inner == 0) meshes.push_back(make_mesh({asked.size() / inner, inner}));
  return meshes;
}

std::optional<Choice> on_more_ranks(const Model& model, const Options& options, int64_t memory) {
  try {
    for (int64_t ranks = 2 * options.mesh.size(); ranks <= kMostRanks; ranks *= 2) {
      auto choice = try_strategy(model, options, "zero3", make_mesh({ranks}));
      if (choice.bytes <= memory) return choice;
    }
  } catch (const ValueError&) {
    // Padding beyond what can be counted: no answer either.
  }
  return std::nullopt;
}

}  // namespace

Fit fit(const Model& model, const Options& options, const std::string& strategy, int64_t memory) {
  if (memory < 1) throw ValueError("GPU memory: expected more than what is set aside of it");
  Fit result;
  result.memory = memory;
  result.asked = measure(model, options, strategy);
  const auto one = make_mesh({options.mesh.size()});
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"})
    result.same_ranks.push_back(try_strategy(model, options, name, one));
  if (options.layout != Options::Layout::kTensorAtomic)
    for (const auto& mesh : two_axes(options.mesh))
      for (const char* name : {"hsdp", "hfsdp"}) result.same_ranks.push_back(try_strategy(model, options, name, mesh));
  std::stable_sort(result.same_ranks.begin(), result.same_ranks.end(), [](const Choice& a, const Choice& b) {
    return std::pair(a.sent, a.bytes) < std::pair(b.sent, b.bytes);
  });
  const auto it = std::find_if(result.same_ranks.begin(), result.same_ranks.end(),
                               [&](const Choice& c) { return c.bytes <= memory; });
  if (it != result.same_ranks.end()) result.best = *it;
  if (!result.best) result.more_ranks = on_more_ranks(model, options, memory);
  return result;
}

}  // namespace fsdp::plan
