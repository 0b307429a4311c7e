#include "layout/transition_plan.h"

#include <variant>

#include <fsdp/error.h>

namespace fsdp::detail {

Segments local_segments(std::span<const int64_t> axis_sizes, std::span<const Placement> placements,
                        std::span<const int64_t> coordinates) {
  Segments s{0, 1};
  for (auto n : axis_sizes) s.count *= n;
  for (size_t i = axis_sizes.size(); i-- > 0;) {
    if (!is_sharded(placements[i])) continue;
    s.count /= axis_sizes[i];
    s.first += coordinates[i] * s.count;
  }
  return s;
}

int64_t segment_begin(const GlobalLayout& layout, int64_t segment) {
  return segment == layout.num_segments() ? layout.size : layout.rank_to_offset[static_cast<size_t>(segment)];
}

std::vector<TransitionStep> plan_transition(std::span<const int64_t> axis_sizes,
                                            std::span<const std::string> axis_names, const std::vector<Placement>& from,
                                            const std::vector<Placement>& to) {
  using Kind = TransitionStep::Kind;
  std::vector<TransitionStep> steps;
  auto current = from;
  auto step = [&](Kind kind, size_t axis, double scale = 1.0) {
    current[axis] = to[axis];
    if (axis_sizes[axis] > 1) steps.push_back({kind, static_cast<int64_t>(axis), current, scale});
  };
  auto refuse = [&](size_t axis) {
    throw ValueError("axis '" + axis_names[axis] + "': no collective turns " + to_string(current[axis]) + " into " +
                     to_string(to[axis]));
  };
  // Sharding leaves from the outermost (least significant) axis in: then the ranges that a gather joins are adjacent.
  for (size_t i = 0; i < axis_sizes.size(); ++i) {
    if (!is_sharded(from[i]) || is_sharded(to[i])) continue;
    if (is_partial(to[i])) refuse(i);
    step(Kind::kAllGather, i);
  }
  // Everything else from the innermost axis out: an axis is sharded only when all axes inside it are.
  for (size_t i = axis_sizes.size(); i-- > 0;) {
    if (current[i] == to[i]) continue;
    const auto* partial = std::get_if<Partial>(&current[i]);
    const double scale = partial && partial->op == ReduceOp::kAvg ? 1.0 / static_cast<double>(axis_sizes[i]) : 1.0;
    if (partial && is_sharded(to[i]))
      step(Kind::kReduceScatter, i, scale);
    else if (partial && is_replicate(to[i]))
      step(Kind::kAllReduce, i, scale);
    else if (is_replicate(current[i]) && is_sharded(to[i]))
      step(Kind::kSlice, i);
    else if (is_replicate(current[i]) && is_partial(to[i]) && std::get<Partial>(to[i]).op == ReduceOp::kAvg)
      step(Kind::kRelabel, i);
    else
      refuse(i);
  }
  return steps;
}

}  // namespace fsdp::detail
