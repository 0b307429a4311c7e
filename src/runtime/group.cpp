#include "runtime/group.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace fsdp::detail {
namespace {

/// parameters_ is protected; a pointer to it formed in a derived class is the language's own way in.
struct ParametersAccess : torch::nn::Module {
  static constexpr auto member() { return &ParametersAccess::parameters_; }
};

const Placement& sharding_kind(const GroupOptions& o) {
  static const Placement kRows = RowAtomic{};
  for (const auto* sequence : {&o.optimizer, &o.gradient, &o.parameter})
    for (const auto& p : *sequence)
      if (is_sharded(p)) return p;
  return kRows;
}

std::shared_ptr<const GlobalLayout> plan_layout(const GroupOptions& o, const std::vector<ParameterShape>& shapes) {
  std::vector<Shape> planned;
  for (const auto& s : shapes) planned.push_back(s.planned);
  const auto& kind = sharding_kind(o);
  if (std::holds_alternative<TensorAtomic>(kind))
    return std::make_shared<const GlobalLayout>(build_tensor_atomic_layout(planned, o.owners, o.mesh.size()));
  const auto* block = std::get_if<BlockAtomic>(&kind);
  return std::make_shared<const GlobalLayout>(
      build_row_atomic_layout(planned, o.mesh.size(), block ? block->block_size : 1, o.layout));
}

std::vector<Placement> replicated(const DeviceMesh& mesh) {
  return std::vector<Placement>(static_cast<size_t>(mesh.ndim()), Replicate{});
}

bool covers(const ElementRange& a, const ElementRange& b) { return a.begin <= b.begin && b.end <= a.end; }

at::Tensor part(const at::Tensor& flat, const ElementRange& of, const ElementRange& range) {
  return flat.narrow(0, range.begin - of.begin, range.size());
}

std::vector<ParameterShape> shapes_of(const std::vector<ParameterInfo>& parameters) {
  std::vector<ParameterShape> shapes;
  for (const auto& p : parameters) shapes.emplace_back(p.tensor);
  return shapes;
}

/// fp64 weights keep their precision under the default policy, and frozen ones have no optimizer to keep more for.
at::ScalarType choose_main_dtype(const MixedPrecisionPolicy& policy, const at::Tensor& parameter) {
  const auto own = parameter.scalar_type();
  if (!parameter.requires_grad()) return policy.param_dtype.value_or(own);
  const auto wanted = policy.main_params_dtype.value_or(own);
  return own == at::kDouble && wanted == at::kFloat ? at::kDouble : wanted;
}

}  // namespace

Group::Group(const GroupOptions& o, const std::vector<ParameterInfo>& parameters)
    : mesh_(o.mesh),
      requires_grad_(parameters.front().tensor.requires_grad()),
      shapes_(shapes_of(parameters)),
      pool_(o.pool),
      gather_channel_(o.gather_channel),
      layout_(plan_layout(o, shapes_)),
      refresh_plan_(mesh_, o.optimizer, o.parameter),
      gather_plan_(mesh_, o.parameter, replicated(mesh_)),
      full_plan_(mesh_, o.optimizer, replicated(mesh_)),
      aliased_(false),
      direct_(same_shards(mesh_, o.parameter, replicated(mesh_))),
      main_(DBuffer::wrap(drained_tensor(local_range(mesh_, o.optimizer, *layout_).size(), at::kFloat, mesh_.device()),
                          mesh_, o.optimizer, layout_)),
      model_(main_),
      view_(*this) {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  const auto& first = parameters.front().tensor;
  const auto compute = o.precision.param_dtype.value_or(first.scalar_type());
  const auto main = choose_main_dtype(o.precision, first);
  for (const auto& p : parameters) {
    handles_.emplace_back(p.tensor);
    names_.push_back(p.names.front());
    aliases_.push_back(p.names);
    registrations_.push_back(p.registrations);
    unwritten_.push_back(p.tensor.is_meta() ? p.tensor._version() : -1);
  }
  const auto main_range = local_range(mesh_, o.optimizer, *layout_);
  const auto model_range = local_range(mesh_, o.parameter, *layout_);
  aliased_ = main == compute;
  if (!aliased_) {
    main_ = DBuffer(mesh_, o.optimizer, layout_, main);
    model_ = DBuffer(mesh_, o.parameter, layout_, compute);
  } else if (covers(model_range, main_range)) {
    model_ = DBuffer(mesh_, o.parameter, layout_, compute);
    main_ = DBuffer::wrap(part(model_.local_buffer(), model_range, main_range), mesh_, o.optimizer, layout_);
  } else {
    main_ = DBuffer(mesh_, o.optimizer, layout_, main);
    model_ = DBuffer::wrap(part(main_.local_buffer(), main_range, model_range), mesh_, o.parameter, layout_);
  }
  full_ = direct_ ? model_.local_buffer() : at::empty({layout_->size}, model_.local_buffer().options());
  for (size_t i = 0; i < shapes_.size(); ++i) {
    rest_views_.push_back(rows_of(main_.local_buffer(), i));
    full_views_.push_back(shapes_[i].whole(full_, layout_->tensor_to_offset[i]));
    add_hook_key(rest_views_.back());
    add_hook_key(full_views_.back());
  }
  if (!direct_) drain_storage(full_.storage());  // the views had to be taken while it had its size; no page was touched
  if (requires_grad_) gradients_.emplace(o, layout_, handles_, shapes_, names_, first.scalar_type(), compute);
}

Group::~Group() = default;

at::Tensor Group::rows_of(const at::Tensor& flat, size_t index) const {
  return shapes_[index].rows(flat, *layout_, main_.range(), static_cast<int64_t>(index));
}

void Group::keep_rows(size_t index, const at::Tensor& full) {
  const auto r = main_.local_rows(static_cast<int64_t>(index));
  if (r.begin == r.end) return;
  rest_views_[index].copy_(full.dim() == 0 ? full.view({1}) : full.narrow(0, r.begin, r.end - r.begin));
}

void Group::load_initial_values(const std::vector<ParameterInfo>& parameters) {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i)
    if (unwritten_[i] < 0) keep_rows(i, parameters[i].tensor.detach());
}

void Group::show(const std::vector<at::Tensor>& views) {
  for (size_t i = 0; i < handles_.size(); ++i) handles_[i].show(views[i]);
}

void Group::take_over() {
  Unhooked unhooked;
  show(rest_views_);
}

void Group::initialise(size_t index, const at::Tensor& full) {
  unwritten_[index] = -1;
  keep_rows(index, full);
}

void Group::values_written() {
  invalidate();
  std::fill(unwritten_.begin(), unwritten_.end(), -1);
}

int64_t Group::stamp() const {
  int64_t sum = main_.local_buffer()._version();
  for (const auto& h : handles_)
    if (auto handle = h.lock(); handle.defined()) sum += handle._version();
  return sum;
}

/// Brings the compute weights in the parameter placement up to date with the optimizer's weights.
void Group::refresh_model(const std::string& unit) {
  const auto wide = covers(model_.range(), main_.range());
  auto model = model_.local_buffer();
  auto source = wide ? part(model, model_.range(), main_.range()) : model;
  if (!aliased_) source.copy_(wide ? main_.local_buffer() : part(main_.local_buffer(), main_.range(), model_.range()));
  if (wide && refresh_plan_.communicates()) {
    TransitionRun run({.mesh = mesh_,
                       .plan = &refresh_plan_,
                       .layout = layout_,
                       .source = source,
                       .range = main_.range(),
                       .destination = model,
                       .destination_range = model_.range(),
                       .channel = gather_channel_,
                       .unit = unit});
    run.start();
    run.finish();
  }
  model_stamp_ = stamp();
}

void Group::start_unshard(const std::string& unit) {
  if (state_ != State::kSharded) return;
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  if (model_stamp_ != stamp()) refresh_model(unit);
  gathered_stamp_ = model_stamp_;
  state_ = State::kGathering;
  if (direct_) return;
  if (full_.numel() > 0 && !full_lost_) pool_->fill(full_.storage(), full_.nbytes());
  gathering_.emplace(TransitionRun::Arguments{.mesh = mesh_,
                                              .plan = &gather_plan_,
                                              .layout = layout_,
                                              .source = model_.local_buffer(),
                                              .range = model_.range(),
                                              .destination = full_,
                                              .destination_range = {0, layout_->size},
                                              .channel = gather_channel_,
                                              .unit = unit});
  full_lost_ = true;  // unless all of it is submitted
  gathering_->start();
  full_lost_ = false;
}

void Group::finish_gather() {
  if (!gathering_) return;
  auto run = std::move(*gathering_);
  gathering_.reset();
  full_lost_ = true;  // unless it ends well
  run.finish();
  full_lost_ = false;
}

void Group::finish_unshard(const std::string& unit) {
  if (state_ == State::kFull) return;
  start_unshard(unit);
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  finish_gather();
  if (gathered_stamp_ != stamp() || model_stamp_ == -1) {
    // Gathered ahead, and the optimizer stepped in between.
    reshard();
    start_unshard(unit);
    finish_gather();
  }
  show(full_views_);
  state_ = State::kFull;
}

void Group::reshard() {
  if (state_ == State::kSharded) return;
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  finish_gather();
  const bool was_full = std::exchange(state_, State::kSharded) == State::kFull;
  for (size_t i = 0; was_full && i < handles_.size(); ++i) {
    // A handle that was given other data meanwhile keeps it, so that check_handles() finds it.
    const auto handle = handles_[i].lock();
    if (handle.defined() && handle.storage().is_alias_of(full_.storage())) handles_[i].show(shown(i));
  }
  if (!direct_ && !full_lost_) pool_->drain(full_.storage());
}

const at::Tensor& Group::shown(size_t i) const {
  return state_ == State::kFull ? full_views_[i] : full_main_ ? full_main_views_[i] : rest_views_[i];
}

void Group::check_handles(const std::string& unit) const {
  auto fail = [&](size_t i, const std::string& what) {
    throw StateError(
        fmt::format("unit '{}': parameter '{}' {} after fully_shard; load, convert and move the model before "
                    "sharding it, or write into the parameters in place",
                    unit, names_[i], what));
  };
  for (size_t i = 0; i < handles_.size(); ++i) {
    auto handle = handles_[i].lock();
    if (!handle.defined()) fail(i, "was replaced");
    for (const auto& r : registrations_[i]) {
      auto module = r.module.lock();
      if (!module) continue;  // a module that left the tree takes its name along
      const auto* found = (module.get()->*ParametersAccess::member()).find(r.key);
      if (!found || !found->is_same(handle)) fail(i, "was replaced or removed");
    }
    const auto& view = shown(i);
    if (handle.scalar_type() != view.scalar_type())
      fail(i, fmt::format("was converted from {} to {}", c10::toString(view.scalar_type()),
                          c10::toString(handle.scalar_type())));
    if (handle.device() != view.device())
      fail(i, fmt::format("was moved from {} to {}", view.device().str(), handle.device().str()));
    if (handle.sizes() != view.sizes())
      fail(i, fmt::format("was resized from [{}] to [{}]", fmt::join(view.sizes(), ", "),
                          fmt::join(handle.sizes(), ", ")));
    if (!handle.storage().is_alias_of(view.storage())) fail(i, "was given other storage");
    if (handle.requires_grad() != requires_grad_)
      fail(i, fmt::format("had requires_grad set to {}", handle.requires_grad() ? "true" : "false"));
  }
}

void Group::check_values(const std::string& unit) const {
  for (size_t i = 0; i < handles_.size(); ++i)
    if (const auto handle = handles_[i].lock();
        handle.defined() && unwritten_[i] >= 0 && unwritten_[i] == handle._version())
      throw StateError(fmt::format(
          "unit '{}': parameter '{}' was built on the meta device and has no values yet; give fully_shard a "
          "ParameterInit, or fill it in place (sync_model_weights() after writes through .data())",
          unit, names_[i]));
}

void Group::show_full_main(const std::string& unit) {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  auto full = at::zeros({layout_->size}, main_.local_buffer().options());
  TransitionRun run({.mesh = mesh_,
                     .plan = &full_plan_,
                     .layout = layout_,
                     .source = main_.local_buffer(),
                     .range = main_.range(),
                     .destination = full,
                     .destination_range = {0, layout_->size},
                     .channel = gather_channel_,
                     .unit = unit});
  run.start();
  run.finish();
  full_main_ = full;
  for (size_t i = 0; i < shapes_.size(); ++i)
    full_main_views_.push_back(shapes_[i].whole(full, layout_->tensor_to_offset[i]));
  show(full_main_views_);
}

void Group::hide_full_main(bool write_back) noexcept {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  if (write_back) {
    for (size_t i = 0; i < shapes_.size(); ++i) keep_rows(i, full_main_views_[i]);
    values_written();
  }
  show(rest_views_);
  full_main_.reset();
  full_main_views_.clear();
}

int64_t Group::full_bytes() const { return direct_ ? 0 : static_cast<int64_t>(full_.storage().nbytes()); }

int64_t Group::persistent_bytes() const {
  auto bytes = [](const DBuffer& b) { return static_cast<int64_t>(b.local_buffer().nbytes()); };
  const int64_t weights = aliased_ ? std::max(bytes(main_), bytes(model_)) : bytes(main_) + bytes(model_);
  return weights + (gradients_ ? bytes(gradients_->main_grad()) : 0);
}

std::string Group::describe() const {
  auto text =
      fmt::format("group of {} parameters, {}, {} elements + {} padding\n", handles_.size(),
                  requires_grad_ ? "trainable" : "frozen", layout_->payload(), layout_->size - layout_->payload());
  text += fmt::format(" weights: optimizer {} {}, compute {} {}{}\n", to_string(std::span(main_.placements())),
                      c10::toString(main_.dtype()), to_string(std::span(model_.placements())),
                      c10::toString(model_.dtype()), aliased_ ? " (one memory)" : "");
  text += " first forward after a step:\n";
  text += detail::describe(refresh_plan_, mesh_, main_.placements(), *layout_, model_.dtype());
  text += " each forward and each backward:\n";
  text += detail::describe(gather_plan_, mesh_, model_.placements(), *layout_, model_.dtype());
  if (gradients_) text += gradients_->describe();
  return text;
}

}  // namespace fsdp::detail

namespace fsdp {

const DBuffer& ParameterGroup::main_weight() const { return group_->main_weight(); }
const DBuffer& ParameterGroup::model_weight() const { return group_->model_weight(); }
const DBuffer& ParameterGroup::main_grad() const {
  if (!group_->gradients()) throw StateError("a frozen parameter group has no main_grad; check requires_grad() first");
  return group_->gradients()->main_grad();
}
const std::vector<std::string>& ParameterGroup::fqns() const { return group_->names(); }
const std::vector<std::string>& ParameterGroup::aliases(int64_t index) const { return group_->aliases().at(index); }
at::ScalarType ParameterGroup::dtype() const { return group_->compute_dtype(); }
bool ParameterGroup::requires_grad() const { return group_->requires_grad(); }
int64_t ParameterGroup::full_bytes() const { return group_->full_bytes(); }
int64_t ParameterGroup::persistent_bytes() const { return group_->persistent_bytes(); }
std::string ParameterGroup::describe() const { return group_->describe(); }

}  // namespace fsdp
