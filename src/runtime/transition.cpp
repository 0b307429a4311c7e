#include "runtime/transition.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

namespace fsdp::detail {
namespace {

ElementRange elements(const GlobalLayout& layout, const Segments& s) {
  return {segment_begin(layout, s.first), segment_begin(layout, s.first + s.count)};
}

std::vector<int64_t> coordinates(const DeviceMesh& mesh) {
  std::vector<int64_t> result;
  for (int64_t i = 0; i < mesh.ndim(); ++i) result.push_back(mesh.local_rank(i));
  return result;
}

std::string axis_name(const DeviceMesh& mesh, int64_t axis) { return mesh.axis_names()[axis]; }

/// Elements of each rank of `axis` when `placements` shards it.
std::vector<int64_t> counts(const DeviceMesh& mesh, const std::vector<Placement>& placements,
                            const GlobalLayout& layout, int64_t axis) {
  std::vector<int64_t> result(mesh.size(axis));
  auto at = coordinates(mesh);
  for (int64_t c = 0; c < mesh.size(axis); ++c) {
    at[axis] = c;
    result[c] = elements(layout, local_segments(mesh.shape(), placements, at)).size();
  }
  return result;
}

bool covers(const ElementRange& outer, const ElementRange& inner) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

at::Tensor part(const at::Tensor& flat, const ElementRange& of, const ElementRange& range) {
  return flat.narrow(0, range.begin - of.begin, range.size());
}

}  // namespace

void check_buffer_placements(const DeviceMesh& mesh, const std::vector<Placement>& placements) {
  if (static_cast<int64_t>(placements.size()) != mesh.ndim())
    throw ValueError(fmt::format("expected one placement per mesh axis ({}), got {}: {}", mesh.ndim(),
                                 placements.size(), to_string(std::span(placements))));
  int64_t sharded = -1;
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    const auto& p = placements[i];
    if (std::holds_alternative<Shard>(p))
      throw ValueError(
          fmt::format("a buffer takes RowAtomic, BlockAtomic or TensorAtomic, not {} (axis '{}'); "
                      "only fully_shard converts Shard(0)",
                      to_string(p), axis_name(mesh, i)));
    if (const auto* partial = std::get_if<Partial>(&p);
        partial && partial->op != ReduceOp::kSum && partial->op != ReduceOp::kAvg)
      throw ValueError(
          fmt::format("axis '{}': Partial must be a sum or an average, got {}", axis_name(mesh, i), to_string(p)));
    if (is_sharded(p)) {
      if (sharded >= 0 && placements[sharded] != p)
        throw ValueError(fmt::format("axes '{}' and '{}' mix sharding kinds {} and {}: use one",
                                     axis_name(mesh, sharded), axis_name(mesh, i), to_string(placements[sharded]),
                                     to_string(p)));
      sharded = i;
    } else if (sharded >= 0) {
      throw ValueError(
          fmt::format("sharded axis '{}' lies outside axis '{}' ({}): sharded axes must be the innermost, so "
                      "that a rank holds one contiguous range; reorder the axes",
                      axis_name(mesh, sharded), axis_name(mesh, i), to_string(p)));
    }
  }
}

bool same_shards(const DeviceMesh& mesh, const std::vector<Placement>& a, const std::vector<Placement>& b) {
  for (int64_t i = 0; i < mesh.ndim(); ++i)
    if (mesh.size(i) > 1 && is_sharded(a[i]) != is_sharded(b[i])) return false;
  return true;
}

ElementRange local_range(const DeviceMesh& mesh, const std::vector<Placement>& placements, const GlobalLayout& layout) {
  return elements(layout, local_segments(mesh.shape(), placements, coordinates(mesh)));
}

TransitionPlan::TransitionPlan(const DeviceMesh& mesh, const std::vector<Placement>& from,
                               const std::vector<Placement>& to)
    : steps(plan_transition(mesh.shape(), mesh.axis_names(), from, to)) {}

bool TransitionPlan::communicates() const {
  return std::any_of(steps.begin(), steps.end(), [](const auto& s) { return s.communicates(); });
}

bool TransitionPlan::reduces() const {
  return std::any_of(steps.begin(), steps.end(), [](const auto& s) { return s.reduces(); });
}

TransitionRun::TransitionRun(Arguments arguments)
    : a_(std::move(arguments)), current_(a_.source), range_(a_.range), owned_(a_.consume) {
  if (a_.scale != 1.0 && !a_.plan->reduces()) throw ValueError("a scale needs a reduction to apply it");
}

/// Where a step leaves its result: in the destination when it lies there, else inside what the run may overwrite,
/// else in new memory.
at::Tensor TransitionRun::room_for(const ElementRange& range) const {
  if (a_.destination.defined() && covers(a_.destination_range, range))
    return part(a_.destination, a_.destination_range, range);
  if (owned_ && covers(range_, range)) return part(current_, range_, range);
  return at::empty({range.size()}, a_.source.options());
}

Work TransitionRun::submit(const TransitionStep& step) {
  const auto after = local_range(a_.mesh, step.after, *a_.layout);
  Work work;
  using Kind = TransitionStep::Kind;
  const double scale = step.scale * (scaled_ ? 1.0 : a_.scale);
  switch (step.kind) {
    case Kind::kRelabel:
      return work;
    case Kind::kSlice:
      current_ = part(current_, range_, after);
      range_ = after;
      return work;
    case Kind::kAllGather: {
      auto out = room_for(after);
      auto before = step.after;
      before[step.axis] = RowAtomic{};
      auto parts = counts(a_.mesh, before, *a_.layout, step.axis);
      work = a_.mesh.communicator(step.axis, a_.channel).all_gather(out, current_, parts, a_.unit);
      current_ = out;
      owned_ = true;
      break;
    }
    case Kind::kReduceScatter: {
      auto out = room_for(after);
      auto parts = counts(a_.mesh, step.after, *a_.layout, step.axis);
      work = a_.mesh.communicator(step.axis, a_.channel).reduce_scatter(out, current_, scale, parts, a_.unit);
      scaled_ = true;
      // In place the rest of the old range stays allocated until the run ends: it is the caller's buffer.
      current_ = out;
      owned_ = true;
      break;
    }
    case Kind::kAllReduce: {
      if (!owned_) {
        auto out = room_for(after);
        if (!out.is_alias_of(current_) || out.data_ptr() != current_.data_ptr()) out.copy_(current_);
        current_ = out;
        owned_ = true;
      }
      work = a_.mesh.communicator(step.axis, a_.channel).all_reduce(current_, ReduceOp::kSum, scale, a_.unit);
      scaled_ = true;
      break;
    }
  }
  range_ = after;
  return work;
}

void TransitionRun::start() {
  while (next_ < a_.plan->steps.size()) {
    const auto& step = a_.plan->steps[next_];
    pending_ = submit(step);
    ++next_;
    if (step.communicates()) return;
  }
}

void TransitionRun::finish() {
  pending_.wait();
  pending_ = {};
  while (next_ < a_.plan->steps.size()) {
    start();
    pending_.wait();
    pending_ = {};
  }
  if (a_.destination.defined()) {
    auto out = part(a_.destination, a_.destination_range, range_);
    if (out.numel() > 0 && out.data_ptr() != current_.data_ptr()) out.copy_(current_);
    current_ = out;
  }
}

std::string describe(const TransitionPlan& plan, const DeviceMesh& mesh, const std::vector<Placement>& from,
                     const GlobalLayout& layout, at::ScalarType dtype) {
  std::string text;
  auto current = from;
  for (const auto& step : plan.steps) {
    const auto before = local_range(mesh, current, layout).size();
    const auto after = local_range(mesh, step.after, layout).size();
    current = step.after;
    if (!step.communicates()) continue;
    static constexpr const char* kNames[] = {"all_gather", "reduce_scatter", "all_reduce"};
    const int64_t n = std::max(before, after);
    text += fmt::format("  {} over '{}' ({} ranks): {} elements, {} bytes\n", kNames[static_cast<int>(step.kind)],
                        axis_name(mesh, step.axis), mesh.size(step.axis), n,
                        n * static_cast<int64_t>(c10::elementSize(dtype)));
  }
  return text;
}

}  // namespace fsdp::detail
