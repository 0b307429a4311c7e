#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/context.h>
#include <fsdp/dbuffer.h>
#include <fsdp/mixed_precision.h>
#include <fsdp/parameter_group.h>
#include <fsdp/placement.h>

#include "runtime/gradients.h"
#include "runtime/parameter.h"
#include "runtime/storage_pool.h"
#include "runtime/transition.h"

namespace fsdp::detail {

/// What the groups of one unit have in common.
struct GroupOptions {
  DeviceMesh mesh;                                        // data-parallel axes only
  std::vector<Placement> parameter, gradient, optimizer;  // buffers' kinds of placement
  MixedPrecisionPolicy precision;
  double grad_scale = 1.0;
  ShardLayout layout = ShardLayout::kPadded;
  RuntimePolicy::GradReduction reduction = RuntimePolicy::GradReduction::kEveryMicrobatch;
  Channel gather_channel = Channel::kGather, reduce_channel = Channel::kReduce;
  std::shared_ptr<StoragePool> pool;
  std::vector<int64_t> owners = {};  // TensorAtomic: one per parameter of the group
};

/// Parameters of one unit that share dtype and requires_grad: their buffers, and the handles' way between showing the
/// shard (at rest) and the full weights (in compute). Communication is collective over the mesh.
class Group {
 public:
  /// Plans and allocates, without touching the parameters. ValueError for placements that cannot be reached.
  Group(const GroupOptions& options, const std::vector<ParameterInfo>& parameters);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  /// Copies this rank's rows out of the parameters' values. No communication.
  void load_initial_values(const std::vector<ParameterInfo>& parameters);
  /// Keeps this rank's rows of the whole values of meta parameter `index`.
  void initialise(size_t index, const at::Tensor& full);
  /// From here on the handles show shards. Cannot fail half way.
  void take_over();

  // ---- weights
  /// Submits the gather of the full weights (and first whatever brings compute weights up to date).
  void start_unshard(const std::string& unit);
  /// Waits, and points the handles at the full weights.
  void finish_unshard(const std::string& unit);
  /// Points the handles back at the resting view and gives the full buffer's memory back. Idempotent.
  void reshard();
  bool is_unsharded() const { return state_ == State::kFull; }
  bool holds_full_buffer() const { return state_ != State::kSharded; }
  /// Next unshard recomputes the compute weights whatever the version counters say.
  void invalidate() { model_stamp_ = -1; }
  /// Values came in a way that no version counter sees.
  void values_written();
  /// StateError naming the parameter that was replaced, moved, converted or resized behind the library's back.
  void check_handles(const std::string& unit) const;
  /// StateError naming the parameter that came from the meta device and was never given values.
  void check_values(const std::string& unit) const;

  // ---- full values in the optimizer's dtype (FullParameters)
  void show_full_main(const std::string& unit);
  void hide_full_main(bool write_back) noexcept;
  bool shows_full_main() const { return full_main_.has_value(); }

  // ---- gradients; null for a frozen group
  Gradients* gradients() { return gradients_ ? &*gradients_ : nullptr; }

  const std::vector<Handle>& handles() const { return handles_; }
  const std::vector<ParameterShape>& shapes() const { return shapes_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::vector<std::string>>& aliases() const { return aliases_; }
  /// This rank's rows of parameter `index` in a flat tensor as long as its main weights, in the shape the handle has at
  /// rest.
  at::Tensor rows_of(const at::Tensor& flat, size_t index) const;
  const DBuffer& main_weight() const { return main_; }
  const DBuffer& model_weight() const { return model_; }
  const Gradients* gradients() const { return gradients_ ? &*gradients_ : nullptr; }
  at::ScalarType compute_dtype() const { return model_.dtype(); }
  at::ScalarType main_dtype() const { return main_.dtype(); }
  bool requires_grad() const { return requires_grad_; }
  const DeviceMesh& mesh() const { return mesh_; }
  const c10::Storage& full_storage() const { return full_.storage(); }
  int64_t full_elements() const { return layout_->size; }
  int64_t payload() const { return layout_->payload(); }
  int64_t full_bytes() const;
  int64_t persistent_bytes() const;
  std::string describe() const;
  const ParameterGroup& view() const { return view_; }

 private:
  enum class State { kSharded, kGathering, kFull };

  int64_t stamp() const;
  void refresh_model(const std::string& unit);
  void finish_gather();
  /// Copies this rank's rows out of a whole tensor.
  void keep_rows(size_t index, const at::Tensor& full);
  void show(const std::vector<at::Tensor>& views);
  /// What handle `index` shows in the present state.
  const at::Tensor& shown(size_t index) const;

  DeviceMesh mesh_;
  bool requires_grad_;
  std::vector<Handle> handles_;
  std::vector<ParameterShape> shapes_;
  std::vector<std::string> names_;
  std::vector<std::vector<std::string>> aliases_;
  std::vector<std::vector<ParameterInfo::Registration>> registrations_;
  std::vector<int64_t> unwritten_;  // of a meta parameter that nobody has filled: its version; else -1
  std::shared_ptr<StoragePool> pool_;
  Channel gather_channel_;

  std::shared_ptr<const GlobalLayout> layout_;
  TransitionPlan refresh_plan_, gather_plan_, full_plan_;
  bool aliased_;  // equal dtypes: the smaller of main and model weights is a part of the other
  bool direct_;   // the model weight is the full weight: nothing is gathered into a buffer of its own
  DBuffer main_, model_;
  at::Tensor full_;  // flat full weights in compute; when direct_, the model weight's buffer
  std::vector<at::Tensor> rest_views_, full_views_;
  std::optional<Gradients> gradients_;

  State state_ = State::kSharded;
  std::optional<TransitionRun> gathering_;
  bool full_lost_ = false;  // a gather failed: the transport may still write the full buffer, so nobody else gets it
  int64_t gathered_stamp_ = -1, model_stamp_ = -1;
  std::optional<at::Tensor> full_main_;
  std::vector<at::Tensor> full_main_views_;
  ParameterGroup view_;
};

}  // namespace fsdp::detail
