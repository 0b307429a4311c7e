#include "plan/traffic.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace fsdp::plan {
namespace {

using Key = std::tuple<int64_t, std::string, Dtype>;

class Counter {
 public:
  Counter(const Plan& plan, int64_t rank) : mesh_(plan.options.mesh), rank_(rank) {}

  /// The collectives of `steps`, `times` over.
  void add(const GroupPlan& group, const std::vector<Placement>& from, const std::vector<Step>& steps, Dtype dtype,
           int64_t times) {
    auto now = local_range(mesh_, from, group.layout, rank_);
    for (const auto& step : steps) {
      const auto after = local_range(mesh_, step.after, group.layout, rank_);
      const auto elements = std::max(now.size(), after.size());
      now = after;
      if (!step.communicates() || times == 0) continue;
      auto& t = found_[{step.axis, name_of(step.kind), dtype}];
      const auto bytes = elements * bytes_of(dtype), ranks = mesh_.shape[step.axis];
      const int64_t rounds = step.kind == Step::Kind::kAllReduce ? 2 : 1;
      t.calls += times;
      t.elements += times * elements;
      t.bytes += times * bytes;
      t.sent += times * rounds * static_cast<int64_t>(static_cast<__int128>(bytes) * (ranks - 1) / ranks);
    }
  }

  std::vector<Traffic> result() const {
    std::vector<Traffic> all;
    for (const auto& [key, t] : found_) {
      all.push_back(t);
      std::tie(all.back().axis, all.back().operation, all.back().dtype) = key;
    }
    return all;
  }

 private:
  static const char* name_of(Step::Kind kind) {
    switch (kind) {
      case Step::Kind::kAllGather:
        return "all_gather";
      case Step::Kind::kReduceScatter:
        return "reduce_scatter";
      default:
        return "all_reduce";
    }
  }

  const Mesh& mesh_;
  int64_t rank_;
  std::map<Key, Traffic> found_;
};

}  // namespace

std::vector<Traffic> traffic(const Plan& plan, int64_t rank) {
  const auto& o = plan.options;
  Counter counter(plan, rank);
  const int64_t gathers = (o.reshard_after_forward ? 2 : 1) * o.microbatches;
  for (const auto& unit : plan.units)
    for (const auto& g : unit.groups) {
      const auto main = local_range(o.mesh, g.optimizer, g.layout, rank);
      const auto model = local_range(o.mesh, g.parameter, g.layout, rank);
      // Weights that no optimizer changes are brought up to date once, not in every step.
      if (model.covers(main) && g.trainable) counter.add(g, g.optimizer, g.refresh, g.compute, unit.count);
      counter.add(g, g.parameter, g.gather, g.compute, unit.count * gathers);
      if (!g.trainable) continue;
      counter.add(g, g.partial, g.contribute, g.comm.value_or(g.compute), unit.count * o.microbatches);
      const bool reduces = std::any_of(g.finalize.begin(), g.finalize.end(), [](const Step& s) { return s.reduces(); });
      counter.add(g, g.accumulated, g.finalize, reduces ? g.comm.value_or(g.grad) : g.grad, unit.count);
    }
  return counter.result();
}

TrafficSum sum(const std::vector<Traffic>& all) {
  TrafficSum s;
  for (const auto& t : all) {
    s.calls += t.calls;
    s.bytes += t.bytes;
    s.sent += t.sent;
  }
  return s;
}

}  // namespace fsdp::plan
