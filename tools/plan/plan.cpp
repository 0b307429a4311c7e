#include "plan/plan.h"

#include <algorithm>
#include <numeric>

#include <fsdp/buffer_split.h>
#include <fsdp/error.h>
#include <fsdp/owner_plan.h>

namespace fsdp::plan {
namespace {

void check_options(const Options& o) {
  auto within = [](const char* what, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most)
      throw ValueError(std::string(what) + ": expected " + std::to_string(least) + " to " + std::to_string(most) +
                       ", got " + std::to_string(value));
  };
  within("block size", o.block, 1, INT64_MAX);
  within("optimizer state", o.optimizer_state, 0, 1024);
  within("microbatches", o.microbatches, 1, 1024);
  o.placements.validate();
  if (o.placements.dp_axes.size() != o.mesh.shape.size())
    throw ValueError("placements: expected one per axis of the mesh (" + std::to_string(o.mesh.shape.size()) +
                     "), got " + std::to_string(o.placements.dp_axes.size()));
  if (o.layout != Options::Layout::kTensorAtomic) return;
  if (o.block > 1) throw ValueError("the tensor-atomic layout keeps whole tensors together; it takes no block size");
  if (o.mesh.ndim() > 1)
    throw ValueError("the tensor-atomic layout places whole tensors on the ranks of one axis; the mesh has " +
                     std::to_string(o.mesh.ndim()) + " axes");
}

std::vector<Placement> for_buffers(const Options& o, const std::vector<Placement>& placements) {
  Placement kind = RowAtomic{};
  if (o.layout == Options::Layout::kTensorAtomic) kind = TensorAtomic{};
  if (o.layout != Options::Layout::kTensorAtomic && o.block > 1) kind = BlockAtomic{o.block};
  std::vector<Placement> result;
  for (const auto& p : placements) result.push_back(is_sharded(p) ? kind : p);
  return result;
}

std::vector<Placement> all_partial(const std::vector<Placement>& gradient) {
  std::vector<Placement> result;
  for (const auto& p : gradient) result.push_back(is_partial(p) ? p : Placement(Partial{}));
  return result;
}

/// fp64 weights keep their precision under the default policy, and frozen ones have no optimizer to keep more for.
Dtype main_dtype(const Precision& p, Dtype own, bool trainable) {
  if (!trainable) return p.param.value_or(own);
  const auto wanted = p.main.value_or(own);
  return own == Dtype::kFloat64 && wanted == Dtype::kFloat32 ? own : wanted;
}

std::vector<int64_t> payload_boundaries(const GlobalLayout& layout) {
  std::vector<int64_t> order(static_cast<size_t>(layout.num_tensors()));
  std::iota(order.begin(), order.end(), 0);
  std::erase_if(order, [&](int64_t t) { return layout.numel(t) == 0; });
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return layout.tensor_to_offset[a] < layout.tensor_to_offset[b]; });
  std::vector<int64_t> before;
  before.reserve(layout.rank_to_offset.size() + 1);
  int64_t done = 0;  // elements of the tensors that end at or before the boundary
  size_t next = 0;
  auto add = [&](int64_t boundary) {
    while (next < order.size() && layout.tensor_to_offset[order[next]] + layout.numel(order[next]) <= boundary)
      done += layout.numel(order[next++]);
    const int64_t inside = next < order.size() ? boundary - layout.tensor_to_offset[order[next]] : 0;
    before.push_back(done + std::max<int64_t>(inside, 0));
  };
  for (auto offset : layout.rank_to_offset) add(offset);
  add(layout.size);
  return before;
}

std::vector<Shape> shapes_of(const std::vector<Tensor>& tensors) {
  std::vector<Shape> shapes;
  for (const auto& t : tensors) shapes.push_back(planned_shape(t.shape));
  return shapes;
}

/// Tensors of one dtype, in order of first appearance, with their places in the unit.
struct Part {
  std::vector<Tensor> tensors;
  std::vector<size_t> places;
};
std::vector<Part> parts_of(const Unit& unit) {
  std::vector<Part> parts;
  for (size_t i = 0; i < unit.tensors.size(); ++i) {
    const auto& t = unit.tensors[i];
    auto it = std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return p.tensors[0].dtype == t.dtype; });
    if (it == parts.end()) it = parts.insert(parts.end(), Part{});
    it->tensors.push_back(t);
    it->places.push_back(i);
  }
  return parts;
}

bool shards_anything(const Placements& p) {
  return std::any_of(p.optimizer.begin(), p.optimizer.end(), is_sharded) ||
         std::any_of(p.gradient.begin(), p.gradient.end(), is_sharded) ||
         std::any_of(p.parameter.begin(), p.parameter.end(), is_sharded);
}

UnitPlan plan_by_rows(const Unit& unit, const Options& o) {
  UnitPlan plan{unit.name, unit.count, unit.root, {}};
  const auto layout = o.layout == Options::Layout::kUnpadded ? ShardLayout::kUnpadded : ShardLayout::kPadded;
  const bool divides = layout == ShardLayout::kPadded && shards_anything(o.placements);
  for (auto& part : parts_of(unit)) {
    const auto shapes = shapes_of(part.tensors);
    if (!divides) {
      auto planned = build_row_atomic_layout(shapes, o.mesh.size(), o.block, layout);
      plan.groups.emplace_back(o, std::move(part.tensors), !unit.frozen, std::move(planned));
      continue;
    }
    for (auto& buffer : plan_buffers(shapes, o.mesh.size(), {.block_size = o.block}).buffers) {
      std::vector<Tensor> tensors;
      for (auto i : buffer.tensors) tensors.push_back(part.tensors[static_cast<size_t>(i)]);
      plan.groups.emplace_back(o, std::move(tensors), !unit.frozen, std::move(buffer.layout));
    }
  }
  return plan;
}

/// Owners of all tensors of all units are chosen at once.
std::vector<UnitPlan> plan_by_owners(const Model& model, const Options& o) {
  std::vector<Shape> shapes;
  for (const auto& unit : model.units)
    for (int64_t k = 0; k < unit.count; ++k)
      for (const auto& t : unit.tensors) shapes.push_back(planned_shape(t.shape));
  const auto owners = assign_owners(shapes, o.mesh.size());
  std::vector<UnitPlan> plans;
  size_t at = 0;
  for (const auto& unit : model.units)
    for (int64_t k = 0; k < unit.count; ++k) {
      UnitPlan plan{unit.count > 1 ? unit.name + " " + std::to_string(k) : unit.name, 1, unit.root, {}};
      for (auto& part : parts_of(unit)) {
        std::vector<int64_t> mine;
        for (auto place : part.places) mine.push_back(owners[at + place]);
        auto planned = build_tensor_atomic_layout(shapes_of(part.tensors), mine, o.mesh.size());
        plan.groups.emplace_back(o, std::move(part.tensors), !unit.frozen, std::move(planned));
      }
      plans.push_back(std::move(plan));
      at += unit.tensors.size();
    }
  return plans;
}

}  // namespace

GroupPlan::GroupPlan(const Options& o, std::vector<Tensor> group, bool trains, GlobalLayout planned)
    : tensors(std::move(group)),
      trainable(trains),
      layout(std::move(planned)),
      compute(o.precision.param.value_or(tensors.front().dtype)),
      main(main_dtype(o.precision, tensors.front().dtype, trains)),
      grad(o.precision.grad.value_or(tensors.front().dtype)),
      comm(o.precision.comm),
      payload_before(payload_boundaries(layout)),
      parameter(for_buffers(o, o.placements.parameter)),
      optimizer(for_buffers(o, o.placements.optimizer)) {
  const auto gradient = for_buffers(o, o.placements.gradient);
  partial = all_partial(gradient);
  accumulated = o.reduce_last ? partial : gradient;
  const std::vector<Placement> whole(parameter.size(), Replicate{});
  refresh = transition(o.mesh, optimizer, parameter);
  gather = transition(o.mesh, parameter, whole);
  contribute = transition(o.mesh, partial, accumulated);
  finalize = transition(o.mesh, accumulated, optimizer);
}

int64_t UnitPlan::payload() const {
  int64_t n = 0;
  for (const auto& g : groups) n += g.payload_before.back();
  return n;
}

int64_t UnitPlan::size() const {
  int64_t n = 0;
  for (const auto& g : groups) n += g.layout.size;
  return n;
}

int64_t Plan::parameters() const {
  int64_t n = 0;
  for (const auto& u : units) n += u.count * u.payload();
  return n;
}

int64_t Plan::padding() const {
  int64_t n = 0;
  for (const auto& u : units) n += u.count * (u.size() - u.payload());
  return n;
}

Plan make_plan(const Model& model, const Options& options) {
  check(model);
  check_options(options);
  Plan plan{model.name, options, {}};
  if (options.layout == Options::Layout::kTensorAtomic) {
    plan.units = plan_by_owners(model, options);
  } else {
    for (const auto& unit : model.units) plan.units.push_back(plan_by_rows(unit, options));
  }
  // Bytes of a step are at most 2^48 elements x 8 bytes x 1024 microbatches, twice: 64 bits hold them.
  constexpr int64_t kMost = int64_t{1} << 48;
  int64_t left = kMost;
  for (const auto& unit : plan.units)
    for (const auto& g : unit.groups) {
      if (g.layout.size > left / unit.count)
        throw ValueError("model \"" + model.name + "\": its buffers have more than 2^48 elements in all, padding " +
                         "included (unit \"" + unit.name + "\" has " + std::to_string(g.layout.size) + ")");
      left -= g.layout.size * unit.count;
    }
  return plan;
}

}  // namespace fsdp::plan
