#include <algorithm>
#include <utility>
#include <vector>

#include "plan/memory.h"

namespace fsdp::plan {
namespace {

/// Sizes of one group's transient buffers on one rank.
struct GroupBytes {
  bool trainable = false;
  bool contributes = false, finalizes = false;  // the plans have steps
  int64_t weights = 0, packed = 0, accumulator = 0, gradients = 0;
  int64_t finalizing = 0;  // the accumulator cast to the wire's dtype, or gathered
};

struct UnitBytes {
  std::string name;
  bool root = false;
  std::vector<GroupBytes> groups = {};

  // ---- state in the walk
  bool gathered = false;
  std::vector<bool> accumulating = {};
};

GroupBytes bytes_of_group(const GroupPlan& g, const Options& o, int64_t rank) {
  auto range = [&](const std::vector<Placement>& p) { return local_range(o.mesh, p, g.layout, rank); };
  GroupBytes b;
  b.trainable = g.trainable;
  if (!g.gather.empty()) b.weights = g.layout.size * bytes_of(g.compute);
  if (!g.trainable) return b;
  b.contributes = !g.contribute.empty();
  b.finalizes = !g.finalize.empty();
  b.packed = g.layout.size * bytes_of(g.comm.value_or(g.compute));
  b.gradients = g.payload_before.back() * bytes_of(g.compute);
  const auto accumulated = range(g.accumulated), optimizer = range(g.optimizer);
  // Where the last reduction leaves every range as it is, gradients add up in what the optimizer reads. This is a
  // matter of placements: that one rank happens to hold everything makes no difference.
  const bool moves = std::any_of(g.finalize.begin(), g.finalize.end(), [](const Step& s) {
    return s.kind != Step::Kind::kAllReduce && s.kind != Step::Kind::kRelabel;
  });
  if (moves) b.accumulator = accumulated.size() * bytes_of(g.grad);
  const bool reduces = std::any_of(g.finalize.begin(), g.finalize.end(), [](const Step& s) { return s.reduces(); });
  if (reduces && g.comm && *g.comm != g.grad)
    b.finalizing = accumulated.size() * bytes_of(*g.comm);
  else if (optimizer.size() > accumulated.size())
    b.finalizing = optimizer.size() * bytes_of(g.grad);
  return b;
}

/// Follows one step and notes the most there was.
class Walk {
 public:
  Walk(const Plan& plan, int64_t rank) : options_(plan.options) {
    for (const auto& unit : plan.units) {
      UnitBytes bytes{.name = unit.name, .root = unit.root};
      for (const auto& g : unit.groups) bytes.groups.push_back(bytes_of_group(g, options_, rank));
      bytes.accumulating.assign(bytes.groups.size(), false);
      for (int64_t k = 0; k < unit.count; ++k) {
        units_.push_back(bytes);
        if (unit.count > 1) units_.back().name.append(" ").append(std::to_string(k));
      }
    }
  }

  Peak run() {
    // The first microbatch and the last; those between are like the second.
    const auto microbatches = std::min<int64_t>(options_.microbatches, 3);
    for (int64_t m = 0; m < microbatches; ++m) {
      forward();
      backward(m == microbatches - 1);
    }
    return peak_;
  }

 private:
  void take(int64_t& what, int64_t bytes, const char* during, const std::string& unit) {
    what += bytes;
    peak_.library_bytes = std::max(peak_.library_bytes, now_.library());
    if (now_.total() <= peak_.at.total()) return;
    peak_.at = now_;
    peak_.where = std::string(during) + " of " + unit;
  }

  void gather(UnitBytes& unit, const char* during, const std::string& by) {
    if (std::exchange(unit.gathered, true)) return;
    for (const auto& g : unit.groups) take(now_.weights, g.weights, during, by);
  }

  void release(UnitBytes& unit) {
    if (!std::exchange(unit.gathered, false)) return;
    for (const auto& g : unit.groups) now_.weights -= g.weights;
  }

  void forward() {
    for (size_t i = 0; i < units_.size(); ++i) {
      gather(units_[i], "forward", units_[i].name);
      if (i + 1 < units_.size()) gather(units_[i + 1], "forward", units_[i].name);
      if (!units_[i].root && options_.reshard_after_forward) release(units_[i]);
    }
    if (units_[0].root && options_.reshard_after_forward) release(units_[0]);
  }

  /// A root begins first and is done last; all others go from the last to the first.
  void backward(bool last) {
    const size_t begin = units_[0].root ? 1 : 0;
    if (begin == 1) {
      gather(units_[0], "backward", units_[0].name);
      if (units_.size() > 1) gather(units_.back(), "backward", units_[0].name);
      take_gradients(units_[0]);
    }
    for (size_t i = units_.size(); i-- > begin;) {
      gather(units_[i], "backward", units_[i].name);
      if (i > begin) gather(units_[i - 1], "backward", units_[i].name);
      take_gradients(units_[i]);
      release(units_[i]);
      reduce(units_[i], last);
    }
    if (begin == 1) {
      release(units_[0]);
      reduce(units_[0], last);
    }
    finish_reduction();
    for (auto& unit : units_) release(unit);
  }

  void take_gradients(const UnitBytes& unit) {
    for (const auto& g : unit.groups) take(now_.gradients, g.gradients, "backward", unit.name);
  }

  void reduce(UnitBytes& unit, bool last) {
    for (size_t g = 0; g < unit.groups.size(); ++g) {
      const auto& group = unit.groups[g];
      if (!group.trainable) continue;
      finish_reduction();
      if (group.contributes) {
        take(now_.packed, group.packed, "reduction", unit.name);
        pending_ = {&unit, g, last};
      } else {
        accumulate(unit, g);
        if (last) {
          take(now_.packed, group.finalizing, "reduction", unit.name);
          pending_ = {&unit, g, last};
        } else if (!group.finalizes) {
          end_accumulation(unit, g);
        }
      }
      now_.gradients -= group.gradients;
    }
  }

  void accumulate(UnitBytes& unit, size_t g) {
    if (unit.accumulating[g]) return;
    unit.accumulating[g] = true;
    take(now_.accumulators, unit.groups[g].accumulator, "reduction", unit.name);
  }

  void end_accumulation(UnitBytes& unit, size_t g) {
    if (unit.accumulating[g]) now_.accumulators -= unit.groups[g].accumulator;
    unit.accumulating[g] = false;
  }

  void finish_reduction() {
    auto [unit, g, last] = std::exchange(pending_, {});
    if (!unit) return;
    const auto& group = unit->groups[g];
    if (group.contributes) {
      accumulate(*unit, g);
      now_.packed -= group.packed;
      if (group.finalizes && !last) return;
      if (group.finalizes) take(now_.packed, group.finalizing, "reduction", unit->name);
    }
    if (group.finalizes || !group.contributes) now_.packed -= group.finalizing;
    end_accumulation(*unit, g);
  }

  struct Pending {
    UnitBytes* unit = nullptr;
    size_t group = 0;
    bool last = false;
  };

  const Options& options_;
  std::vector<UnitBytes> units_;
  Transient now_;
  Peak peak_;
  Pending pending_;
};

}  // namespace

Peak transient_peak(const Plan& plan, int64_t rank) { return Walk(plan, rank).run(); }

}  // namespace fsdp::plan
