#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/layout.h>
#include <fsdp/placement.h>

#include "plan/mesh.h"
#include "plan/model.h"

/// How a model lies on a mesh: what fully_shard would do with these arguments, without LibTorch and without ranks.
namespace fsdp::plan {

/// As fsdp::MixedPrecisionPolicy.
struct Precision {
  std::optional<Dtype> param;                   ///< compute weights; nullopt: the model's own dtype
  std::optional<Dtype> main = Dtype::kFloat32;  ///< the optimizer's weights; nullopt: the model's own
  std::optional<Dtype> grad;                    ///< the optimizer's gradients; nullopt: the model's own
  std::optional<Dtype> comm;                    ///< gradients on the wire; nullopt: of the gradient at hand
};

struct Options {
  Mesh mesh;
  Placements placements;  ///< Shard, whatever `layout` and `block` make of it
  Precision precision = {};
  enum class Layout { kPadded, kUnpadded, kTensorAtomic } layout = Layout::kPadded;
  int64_t block = 1;                  ///< rows that stay together
  int64_t optimizer_state = 2;        ///< tensors per parameter, in the optimizer's dtype: 2 for Adam
  int64_t microbatches = 1;           ///< per step
  bool reduce_last = false;           ///< RuntimePolicy::GradReduction::kLastMicrobatch
  bool reshard_after_forward = true;  ///< false: gathered once per microbatch, and kept until backward
};

/// Parameters of one unit that share a dtype, or a part of these: one flat buffer.
struct GroupPlan {
  GroupPlan(const Options&, std::vector<Tensor> tensors, bool trainable, GlobalLayout layout);

  std::vector<Tensor> tensors;
  bool trainable;
  GlobalLayout layout;
  Dtype compute, main, grad;
  std::optional<Dtype> comm;
  /// Elements of tensors, without padding, before each boundary of the layout's segments: num_segments() + 1 numbers.
  std::vector<int64_t> payload_before;

  // ---- what the runtime does, in the placements as buffers have them
  std::vector<Placement> parameter, partial, accumulated, optimizer;
  std::vector<Step> refresh, gather, contribute, finalize;

  bool one_memory() const { return main == compute; }  ///< main and model weights share memory
};

struct UnitPlan {
  std::string name;
  int64_t count = 1;
  bool root = false;
  std::vector<GroupPlan> groups;

  /// Elements of one such unit, and of its buffers.
  int64_t payload() const;
  int64_t size() const;
};

struct Plan {
  std::string model;
  Options options;
  std::vector<UnitPlan> units;  ///< in order of forward

  int64_t parameters() const;
  /// Elements of padding in all units, of the whole mesh together.
  int64_t padding() const;
};

/// Plans every unit once, however often it occurs; with tensor-atomic layout, where owners differ, every instance.
/// ValueError: what fully_shard would refuse, and arguments out of range.
Plan make_plan(const Model&, const Options&);

}  // namespace fsdp::plan
