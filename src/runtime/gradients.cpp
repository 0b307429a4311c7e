#include "runtime/gradients.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "runtime/group.h"
#include "runtime/unit.h"

namespace fsdp::detail {
namespace {

std::vector<Placement> all_partial(const std::vector<Placement>& gradient) {
  std::vector<Placement> result;
  for (const auto& p : gradient) result.push_back(is_partial(p) ? p : Placement(Partial{ReduceOp::kAvg}));
  return result;
}

/// A reduced value counts as its own average, so accumulating on top of it is right; not as a sum.
bool may_hold_reduced(const DeviceMesh& mesh, const std::vector<Placement>& placements) {
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    const auto* partial = std::get_if<Partial>(&placements[i]);
    if (partial && partial->op == ReduceOp::kSum && mesh.size(i) > 1) return false;
  }
  return true;
}

}  // namespace

Gradients::Gradients(const GroupOptions& options, std::shared_ptr<const GlobalLayout> layout,
                     const std::vector<Handle>& handles, const std::vector<ParameterShape>& shapes,
                     const std::vector<std::string>& names, at::ScalarType own, at::ScalarType compute)
    : mesh_(options.mesh),
      layout_(std::move(layout)),
      handles_(handles),
      shapes_(shapes),
      names_(names),
      pool_(options.pool),
      channel_(options.reduce_channel),
      compute_(compute),
      comm_(options.precision.grad_comm_dtype),
      scale_(options.grad_scale),
      partial_(all_partial(options.gradient)),
      accumulated_(options.reduction == RuntimePolicy::GradReduction::kLastMicrobatch ? partial_ : options.gradient),
      contribute_plan_(mesh_, partial_, accumulated_),
      finalize_plan_(mesh_, accumulated_, options.optimizer),
      whole_{0, layout_->size},
      accumulated_range_(local_range(mesh_, accumulated_, *layout_)),
      shared_(same_shards(mesh_, accumulated_, options.optimizer) && may_hold_reduced(mesh_, accumulated_)),
      main_(mesh_, options.optimizer, layout_, options.precision.main_grads_dtype.value_or(own)),
      base_(handles.size(), false),
      pending_(handles.size(), false),
      installed_(handles.size()),
      refuses_(handles.size(), false),
      sentinel_(at::zeros({1}, main_.local_buffer().options())) {
  Unhooked unhooked;
  add_hook_key(sentinel_);
}

Gradients::~Gradients() {
  if (in_flight()) packed_.abandon(), separate_.abandon();
  registry::remove_storage(sentinel_.storage().unsafeGetStorageImpl());
}

void Gradients::register_unit(const std::weak_ptr<Unit>& unit) {
  registry::add_storage(sentinel_.storage().unsafeGetStorageImpl(), unit, Managed::Kind::kUnreducedGradient);
}

at::Tensor Gradients::rows(const at::Tensor& flat, const ElementRange& range, size_t index) const {
  return shapes_[index].rows(flat, *layout_, range, static_cast<int64_t>(index));
}

/// Nobody reads padding, but norms and optimizers over whole buffers must find zeros there.
void Gradients::zero_gaps(const at::Tensor& flat) const {
  std::vector<std::pair<int64_t, int64_t>> used;
  for (int64_t i = 0; i < layout_->num_tensors(); ++i)
    if (layout_->numel(i) > 0)
      used.emplace_back(layout_->tensor_to_offset[i], layout_->tensor_to_offset[i] + layout_->numel(i));
  std::sort(used.begin(), used.end());
  int64_t at = 0;
  for (auto [begin, end] : used) {
    if (begin > at) flat.narrow(0, at, begin - at).zero_();
    at = end;
  }
  if (at < layout_->size) flat.narrow(0, at, layout_->size - at).zero_();
}

at::Tensor Gradients::accumulator() {
  if (shared_) return main_.local_buffer();
  if (!separate_) {
    separate_ = PooledTensor(pool_, accumulated_range_.size(), main_.dtype(), mesh_.device());
    separate_.tensor().zero_();
  }
  return separate_.tensor();
}

void Gradients::absorb_resting() {
  if (in_flight()) finish();
  for (size_t i = 0; i < handles_.size(); ++i) {
    auto handle = handles_[i].lock();
    if (!handle.defined()) continue;
    auto& grad = handle.mutable_grad();
    // Module::zero_grad(false) puts a detached copy back; a copy of a refusing gradient still refuses.
    const bool untouched = grad.defined() && (refuses_[i] ? has_hook_key(grad) : grad.is_same(installed_[i]));
    if (!grad.defined()) {
      base_[i] = pending_[i] = false;
    } else if (!untouched) {
      // Zeroed while unreduced, or another tensor put in its place.
      auto mine = rows(main_.local_buffer(), main_.range(), i);
      if (grad.data_ptr() != mine.data_ptr() || grad.sizes() != mine.sizes()) {
        if (grad.sizes() != mine.sizes())
          throw StateError(
              fmt::format("unit '{}': the gradient put on parameter '{}' has {} elements, its shard has {}: "
                          "gradients at rest have the resting parameter's shape",
                          unit_, names_[i], grad.numel(), mine.numel()));
        mine.copy_(grad);
      }
      base_[i] = true;
      pending_[i] = false;
    }
    grad = at::Tensor();
    installed_[i] = at::Tensor();
  }
}

FullGradients Gradients::take_full() {
  FullGradients full(handles_.size());
  for (size_t i = 0; i < handles_.size(); ++i) {
    auto handle = handles_[i].lock();
    if (!handle.defined() || !handle.grad().defined()) continue;
    auto& grad = handle.mutable_grad();
    if (grad.sizes() != at::IntArrayRef(shapes_[i].sizes))
      throw StateError(
          fmt::format("unit '{}': backward left a gradient of {} elements on parameter '{}' of {} elements; was "
                      "the parameter used outside the unit's forward and backward?",
                      unit_, grad.numel(), names_[i], layout_->numel(static_cast<int64_t>(i))));
    full[i] = grad.is_sparse() ? grad.to_dense() : std::move(grad);
    grad = at::Tensor();
  }
  return full;
}

at::Tensor Gradients::unreduced_gradient(size_t index) const {
  auto shape = rows(main_.local_buffer(), main_.range(), index).sizes().vec();
  auto view = sentinel_.expand(shape.empty() ? std::vector<int64_t>{1} : shape).variable_data();
  add_hook_key(view);
  return view;
}

void Gradients::install_one(size_t i, bool refuse) {
  auto handle = handles_[i].lock();
  if (!handle.defined()) return;
  refuses_[i] = refuse;
  // variable_data: Optimizer::zero_grad(false) detaches in place, which a view does not allow.
  installed_[i] = refuse     ? unreduced_gradient(i)
                  : base_[i] ? rows(main_.local_buffer(), main_.range(), i).variable_data()
                             : at::Tensor();
  handle.mutable_grad() = installed_[i];
}

void Gradients::install() {
  for (size_t i = 0; i < handles_.size(); ++i) install_one(i, pending_[i]);
}

void Gradients::install_unreduced() {
  for (size_t i = 0; i < handles_.size(); ++i) install_one(i, true);
}

void Gradients::pack(FullGradients gradients) {
  packed_ = PooledTensor(pool_, layout_->size, comm_.value_or(compute_), mesh_.device());
  zero_gaps(packed_.tensor());
  for (size_t i = 0; i < gradients.size(); ++i) {
    auto slot = shapes_[i].whole(packed_.tensor(), layout_->tensor_to_offset[i]);
    if (gradients[i].defined())
      slot.copy_(gradients[i]);
    else
      slot.zero_();
    gradients[i] = at::Tensor();  // at most one parameter's gradient is held twice
  }
}

/// Nothing to reduce yet: contributions go straight to the accumulator, which holds whole tensors.
void Gradients::accumulate_whole(FullGradients gradients) {
  auto flat = accumulator();
  for (size_t i = 0; i < gradients.size(); ++i) {
    auto slot = shapes_[i].whole(flat, layout_->tensor_to_offset[i]);
    if (occupied(i)) {
      if (gradients[i].defined()) slot.add_(gradients[i], scale_);
    } else if (gradients[i].defined()) {
      slot.copy_(gradients[i]);
      if (scale_ != 1.0) slot.mul_(scale_);
    } else {
      slot.zero_();
    }
    gradients[i] = at::Tensor();
  }
}

void Gradients::accumulate_reduced(const at::Tensor& reduced) {
  auto flat = accumulator();
  size_t full = 0;
  for (size_t i = 0; i < handles_.size(); ++i) full += occupied(i);
  if (full == 0) {
    flat.copy_(reduced);
  } else if (full == handles_.size()) {
    flat.add_(reduced);
  } else {
    for (size_t i = 0; i < handles_.size(); ++i) {
      auto slot = rows(flat, accumulated_range_, i);
      auto value = rows(reduced, accumulated_range_, i);
      occupied(i) ? slot.add_(value) : slot.copy_(value);
    }
  }
}

void Gradients::start(FullGradients gradients, bool last, const std::string& unit) {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  unit_ = unit;
  finalize_next_ = last;
  if (contribute_plan_.steps.empty()) {
    accumulate_whole(std::move(gradients));
    std::fill(pending_.begin(), pending_.end(), true);
    if (last) start_finalize();
    if (!last && finalize_plan_.steps.empty()) end_finalize();
    return;
  }
  pack(std::move(gradients));
  reducing_.emplace(TransitionRun::Arguments{.mesh = mesh_,
                                             .plan = &contribute_plan_,
                                             .layout = layout_,
                                             .source = packed_.tensor(),
                                             .range = whole_,
                                             .consume = true,
                                             .scale = scale_,
                                             .channel = channel_,
                                             .unit = unit});
  stage_ = Stage::kContributing;
  reducing_->start();
}

void Gradients::start_finalize() {
  auto source = accumulator();
  if (comm_ && *comm_ != source.scalar_type() && finalize_plan_.reduces()) {
    packed_ = PooledTensor(pool_, source.numel(), *comm_, mesh_.device());
    packed_.tensor().copy_(source);
    source = packed_.tensor();
  }
  reducing_.emplace(TransitionRun::Arguments{.mesh = mesh_,
                                             .plan = &finalize_plan_,
                                             .layout = layout_,
                                             .source = source,
                                             .range = accumulated_range_,
                                             .consume = true,
                                             .channel = channel_,
                                             .unit = unit_});
  stage_ = Stage::kFinalizing;
  reducing_->start();
}

void Gradients::end_finalize() {
  if (reducing_) {
    auto result = reducing_->result();
    auto main = main_.local_buffer();
    if (!shared_) {
      for (size_t i = 0; i < handles_.size(); ++i) {
        auto slot = rows(main, main_.range(), i);
        auto value = rows(result, main_.range(), i);
        base_[i] ? slot.add_(value) : slot.copy_(value);
      }
    } else if (main.numel() > 0 && result.data_ptr() != main.data_ptr()) {
      main.copy_(result);
    }
  }
  reducing_.reset();
  packed_.reset();
  if (!shared_) separate_.reset();
  std::fill(base_.begin(), base_.end(), true);
  std::fill(pending_.begin(), pending_.end(), false);
}

void Gradients::finish() {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  if (stage_ == Stage::kContributing) {
    reducing_->finish();
    accumulate_reduced(reducing_->result());
    reducing_.reset();
    packed_.reset();
    stage_ = Stage::kIdle;
    std::fill(pending_.begin(), pending_.end(), true);
    if (finalize_plan_.steps.empty())
      end_finalize();
    else if (finalize_next_)
      start_finalize();
  }
  if (stage_ == Stage::kFinalizing) {
    reducing_->finish();
    stage_ = Stage::kIdle;
    end_finalize();
  }
}

void Gradients::abandon() noexcept {
  try {
    finish();
  } catch (const std::exception&) {
    stage_ = Stage::kIdle;
    reducing_.reset();
    packed_.abandon();
    separate_.abandon();
    std::fill(pending_.begin(), pending_.end(), false);
  }
}

int64_t Gradients::transient_bytes() const {
  int64_t bytes = 0;
  for (const auto* t : {&packed_, &separate_})
    if (*t) bytes += static_cast<int64_t>(t->tensor().nbytes());
  return bytes;
}

std::string Gradients::describe() const {
  auto text = fmt::format(" each microbatch ({}):\n{}", c10::toString(comm_.value_or(compute_)),
                          detail::describe(contribute_plan_, mesh_, partial_, *layout_, comm_.value_or(compute_)));
  const auto dtype = comm_.value_or(main_.dtype());
  return text + fmt::format(" last microbatch ({}):\n{}", c10::toString(dtype),
                            detail::describe(finalize_plan_, mesh_, accumulated_, *layout_, dtype));
}

void refuse_unreduced(const at::Tensor& gradient, const Unit* unit, const char* call) {
  if (has_hook_key(gradient))
    throw StateError(
        fmt::format("{}: a gradient of unit '{}' is not reduced; run the last backward of the step in "
                    "microbatch(ctx, true), and finish_grad_sync() where the caller manages it",
                    call, unit ? unit->display_name() : "?"));
}

}  // namespace fsdp::detail
