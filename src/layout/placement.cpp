#include <fsdp/placement.h>

#include <optional>

#include <fsdp/error.h>

namespace fsdp {

bool is_replicate(const Placement& p) { return std::holds_alternative<Replicate>(p); }
bool is_partial(const Placement& p) { return std::holds_alternative<Partial>(p); }
bool is_sharded(const Placement& p) { return !is_replicate(p) && !is_partial(p); }

std::string to_string(const Placement& placement) {
  struct Text {
    std::string operator()(const Replicate&) const { return "Replicate"; }
    std::string operator()(const Partial& p) const {
      static constexpr const char* kOps[] = {"sum", "avg", "min", "max"};
      return std::string("Partial(") + kOps[static_cast<int>(p.op)] + ")";
    }
    std::string operator()(const Shard& s) const { return "Shard(" + std::to_string(s.dim) + ")"; }
    std::string operator()(const RowAtomic&) const { return "RowAtomic"; }
    std::string operator()(const BlockAtomic& b) const { return "BlockAtomic(" + std::to_string(b.block_size) + ")"; }
    std::string operator()(const TensorAtomic&) const { return "TensorAtomic"; }
  };
  return std::visit(Text{}, placement);
}

std::string to_string(std::span<const Placement> placements) {
  std::string s = "[";
  for (size_t i = 0; i < placements.size(); ++i) s += (i ? ", " : "") + to_string(placements[i]);
  return s + "]";
}

std::string to_string(const MeshAxis& axis) {
  if (const auto* name = std::get_if<std::string>(&axis)) return "'" + *name + "'";
  return std::to_string(std::get<int64_t>(axis));
}

namespace {

Placement as_stored(const Placement& p) { return std::holds_alternative<Shard>(p) ? Placement(RowAtomic{}) : p; }

void validate_sequence(const Placements& all, const char* name, const std::vector<Placement>& sequence,
                       bool may_be_partial) {
  const auto fail = [&](size_t axis, const std::string& why) {
    throw ValueError(std::string("Placements::") + name + ", axis " + to_string(all.dp_axes[axis]) + ": " + why);
  };
  if (sequence.size() != all.dp_axes.size())
    throw ValueError(std::string("Placements::") + name + ": expected one placement per data-parallel axis (" +
                     std::to_string(all.dp_axes.size()) + "), got " + std::to_string(sequence.size()));
  std::optional<size_t> sharded;
  for (size_t i = 0; i < sequence.size(); ++i) {
    const auto& p = sequence[i];
    if (const auto* s = std::get_if<Shard>(&p); s && s->dim != 0)
      fail(i, "parameters are sharded along dimension 0 only, got " + to_string(p));
    if (const auto* b = std::get_if<BlockAtomic>(&p); b && b->block_size < 1)
      fail(i, "expected blocks of at least one row, got " + to_string(p));
    if (const auto* partial = std::get_if<Partial>(&p)) {
      if (!may_be_partial)
        fail(i, "weights are never partial sums; expected Replicate or a sharding, got " + to_string(p));
      if (partial->op != ReduceOp::kSum && partial->op != ReduceOp::kAvg)
        fail(i, "gradients are summed or averaged, got " + to_string(p));
    }
    if (!is_sharded(p)) {
      if (sharded)
        fail(*sharded, "is sharded outside axis " + to_string(all.dp_axes[i]) + ", which is " + to_string(p) +
                           ": sharded axes must be the innermost; swap the axes or shard the inner one too");
    } else if (!sharded) {
      sharded = i;
    } else if (as_stored(sequence[*sharded]) != as_stored(p)) {
      fail(i, "mixes " + to_string(p) + " with " + to_string(sequence[*sharded]) + "; use one kind of sharding");
    }
  }
}

/// One layout serves all three buffers of a group.
void validate_one_kind(const Placements& all) {
  const Placement* first = nullptr;
  for (const auto* sequence : {&all.parameter, &all.gradient, &all.optimizer})
    for (const auto& p : *sequence) {
      if (!is_sharded(p)) continue;
      if (!first) first = &p;
      if (as_stored(*first) != as_stored(p))
        throw ValueError("Placements: parameter, gradient and optimizer use one kind of sharding, got " +
                         to_string(*first) + " and " + to_string(p));
    }
}

}  // namespace

void Placements::validate() const {
  if (dp_axes.empty()) throw ValueError("Placements::dp_axes: expected at least one data-parallel axis");
  validate_sequence(*this, "parameter", parameter, false);
  validate_sequence(*this, "gradient", gradient, true);
  validate_sequence(*this, "optimizer", optimizer, false);
  validate_one_kind(*this);
}

Placements ddp(MeshAxis axis) { return {{axis}, {Replicate{}}, {Partial{}}, {Replicate{}}}; }
Placements zero1(MeshAxis axis) { return {{axis}, {Replicate{}}, {Partial{}}, {Shard{}}}; }
Placements zero2(MeshAxis axis) { return {{axis}, {Replicate{}}, {Shard{}}, {Shard{}}}; }
Placements zero3(MeshAxis axis) { return {{axis}, {Shard{}}, {Shard{}}, {Shard{}}}; }

Placements hsdp(MeshAxis outer, MeshAxis inner) {
  return {{outer, inner}, {Replicate{}, Shard{}}, {Partial{}, Shard{}}, {Replicate{}, Shard{}}};
}
Placements hfsdp(MeshAxis outer, MeshAxis inner) {
  return {{outer, inner}, {Replicate{}, Shard{}}, {Partial{}, Shard{}}, {Shard{}, Shard{}}};
}

}  // namespace fsdp
