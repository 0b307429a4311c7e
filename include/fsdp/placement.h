#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <fsdp/layout.h>

/// How a buffer lies on the axes of a data-parallel mesh.
namespace fsdp {

enum class ReduceOp { kSum, kAvg, kMin, kMax };

/// Every rank of the axis holds the whole.
struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};
/// Every rank of the axis holds an unreduced contribution; `op` is kSum or kAvg.
struct Partial {
  ReduceOp op = ReduceOp::kAvg;
  friend bool operator==(const Partial&, const Partial&) = default;
};
/// The user's spelling of sharding along a tensor dimension; `fully_shard` turns Shard(0) into
/// RowAtomic and refuses any other dimension. Buffers do not take it.
struct Shard {
  int64_t dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};
/// Sharded between rows.
struct RowAtomic {
  friend bool operator==(const RowAtomic&, const RowAtomic&) = default;
};
/// Sharded between blocks of `block_size` rows.
struct BlockAtomic {
  int64_t block_size = 32;
  friend bool operator==(const BlockAtomic&, const BlockAtomic&) = default;
};
/// Every tensor whole on one owner.
struct TensorAtomic {
  friend bool operator==(const TensorAtomic&, const TensorAtomic&) = default;
};

using Placement = std::variant<Replicate, Partial, Shard, RowAtomic, BlockAtomic, TensorAtomic>;

/// A mesh axis by index (negative counts from the end) or by name.
using MeshAxis = std::variant<int64_t, std::string>;

bool is_replicate(const Placement&);
bool is_partial(const Placement&);
/// Shard, RowAtomic, BlockAtomic or TensorAtomic.
bool is_sharded(const Placement&);
/// "Replicate", "Partial(avg)", "RowAtomic", ...
std::string to_string(const Placement&);
std::string to_string(std::span<const Placement>);
std::string to_string(const MeshAxis&);

/// Placements of a unit's weights in compute, of its gradients between microbatches, and of its
/// optimizer-visible weights and gradients. `dp_axes` are the mesh axes, outer to inner, that the
/// parameters are data parallel over (any ordered subset); the three sequences match them in length
/// and order. `validate()` (called by fully_shard) throws ValueError naming the sequence and axis.
struct Placements {
  std::vector<MeshAxis> dp_axes;
  std::vector<Placement> parameter, gradient, optimizer;

  /// Lengths equal; Partial only in `gradient` (kSum or kAvg); Shard only of dimension 0; no sharded
  /// axis outside a replicated or partial one; no mixing of sharding kinds within one sequence.
  void validate() const;
};

Placements ddp(MeshAxis axis);
Placements zero1(MeshAxis axis);
Placements zero2(MeshAxis axis);
Placements zero3(MeshAxis axis);
/// Weights sharded inside, replicated outside.
Placements hsdp(MeshAxis outer, MeshAxis inner);
/// As hsdp, with the optimizer's weights sharded over both axes.
Placements hfsdp(MeshAxis outer, MeshAxis inner);

}  // namespace fsdp
