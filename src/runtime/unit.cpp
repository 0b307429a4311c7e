#include "runtime/unit.h"

#include <algorithm>

#include <c10/core/GradMode.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "runtime/checkpointed_forward.h"
#include "runtime/registry.h"

namespace fsdp::detail {

Unit& unit_of(FsdpModule& module) { return static_cast<Unit&>(module); }
const Unit& unit_of(const FsdpModule& module) { return static_cast<const Unit&>(module); }

Unit::Unit(std::shared_ptr<ContextState> context, torch::nn::Module& m, SchedulePolicy policy)
    : context_state(std::move(context)),
      context_handle(context_state),
      module(&m),
      module_alive(m.weak_from_this()),
      schedule(std::move(policy)),
      local_name(m.name()) {}

Unit::~Unit() {
  context_state->forget(this);
  for (const auto& group : groups) {
    for (const auto& handle : group->handles()) registry::remove_handle(handle.address());
    registry::remove_storage(group->full_storage().unsafeGetStorageImpl());
    registry::remove_storage(group->main_weight().local_buffer().storage().unsafeGetStorageImpl());
  }
}

FsdpModule::Phase Unit::phase() const {
  if (in_backward) return Phase::kBackward;
  return forward_depth > 0 ? Phase::kForward : Phase::kResting;
}

bool Unit::unsharded() const {
  return std::all_of(groups.begin(), groups.end(), [](const auto& g) { return g->is_unsharded(); });
}

bool Unit::holds_weights() const {
  return std::any_of(groups.begin(), groups.end(), [](const auto& g) { return g->holds_full_buffer(); });
}

bool Unit::trainable() const {
  return std::any_of(groups.begin(), groups.end(), [](const auto& g) { return g->requires_grad(); });
}

bool Unit::has_frozen() const {
  return std::any_of(groups.begin(), groups.end(), [](const auto& g) { return !g->requires_grad(); });
}

int64_t Unit::payload() const {
  int64_t n = 0;
  for (const auto& g : groups) n += g->payload();
  return n;
}

bool Unit::is_ancestor_of(const Unit& other) const {
  for (const Unit* u = other.parent; u; u = u->parent)
    if (u == this) return true;
  return false;
}

Unit::Place Unit::find(const c10::TensorImpl* handle) const {
  for (const auto& group : groups)
    for (size_t i = 0; i < group->handles().size(); ++i)
      if (group->handles()[i].address() == handle) return {group.get(), i};
  throw StateError(fmt::format("unit '{}' does not own this parameter", display_name()));
}

void Unit::check_groups() const {
  for (const auto& g : groups) {
    g->check_handles(display_name());
    g->check_values(display_name());
  }
}

void Unit::start_unshard() {
  for (auto& g : groups) g->start_unshard(label);
}

void Unit::finish_unshard() {
  // All groups' gathers are under way before the first is waited for.
  start_unshard();
  for (auto& g : groups) g->finish_unshard(label);
}

void Unit::release_now() {
  for (auto& g : groups) g->reshard();
}

void Unit::release() {
  if (forward_depth == 0 && !in_backward && !held) release_now();
}

void Unit::prefetch(const std::vector<Unit*>& order, const std::optional<int64_t>& budget) {
  auto it = std::find(order.begin(), order.end(), this);
  if (it == order.end() || (budget && *budget == 0)) return;
  int64_t left = budget.value_or(0);
  for (++it; it != order.end(); ++it) {
    if ((*it)->groups.empty()) continue;
    if (budget) {
      left -= (*it)->payload();
      if (left < 0) return;
    }
    (*it)->start_unshard();
    if (!budget) return;
  }
}

void Unit::begin_forward(bool by_operator) {
  if (context_state->finalize_at_first_forward && !context_state->finalized) context_state->finalize();
  context_state->require_finalized("forward");
  const bool recompute = torch::autograd::get_current_graph_task_id() != -1;
  if (recompute)
    context_state->current_pass();  // belongs to this backward, not to one inside the recompute
  else
    context_state->abandon_stale_pass();
  check_groups();
  for (const auto& g : groups) {
    if (g->shows_full_main() && c10::GradMode::is_enabled())
      throw StateError(
          fmt::format("unit '{}': forward with gradients inside FullParameters; leave its scope, or use "
                      "NoGradGuard",
                      display_name()));
  }
  if (!recompute) context_state->end_operator_forwards(this);
  // From here on the caller ends the forward, or abort_forward() does: count first, so that a failing gather is undone.
  ++forward_depth;
  if (!by_operator) ++module_depth;
  try {
    for (auto& weak : lenders)
      if (auto lender = weak.lock()) {
        ++lender->forward_depth;
        lender->finish_unshard();
      }
    if (!unsharded()) finish_unshard();
    if (!recompute) {
      if (context_state->prefetch_order == PrefetchOrder::kRecorded) context_state->recording_forward.push_back(this);
      prefetch(context_state->forward_prefetch_order(), schedule.forward_prefetch_size);
    }
  } catch (...) {
    abort_forward(by_operator);
    throw;
  }
}

void Unit::end_forward(bool by_operator) {
  // Operator-driven forwards inside this one have no end of their own.
  auto& inner = context_state->operator_forwards;
  while (!inner.empty() && is_ancestor_of(*inner.back())) {
    auto* unit = inner.back();
    inner.pop_back();
    unit->end_forward(true);
  }
  leave_forward();
  if (!by_operator) --module_depth;
  for (auto& weak : lenders)
    if (auto lender = weak.lock(); lender && lender->schedule.reshard_after_forward) lender->release();
  // In a recompute the backward that follows needs the weights again at once.
  const bool recompute = torch::autograd::get_current_graph_task_id() != -1;
  const bool training = c10::GradMode::is_enabled() || CheckpointedForward::active();
  if (!recompute && (schedule.reshard_after_forward || !training)) release();
  if (root && forward_depth == 0 && !recompute) {
    // Weights gathered ahead for units that this forward then did not use. A later root may be next, so only this
    // root's own tree is certain.
    for (auto* u : context_state->forward)
      if (is_ancestor_of(*u) && u->schedule.reshard_after_forward) u->release();
  }
}

void Unit::leave_forward() noexcept {
  if (forward_depth > 0) --forward_depth;
  for (auto& weak : lenders)
    if (auto lender = weak.lock(); lender && lender->forward_depth > 0) --lender->forward_depth;
}

void Unit::abort_forward(bool by_operator) noexcept {
  leave_forward();
  if (!by_operator) --module_depth;
  try {
    auto& ops = context_state->operator_forwards;
    while (!ops.empty() && is_ancestor_of(*ops.back())) {
      ops.back()->leave_forward();
      ops.back()->release();
      ops.pop_back();
    }
    for (auto& weak : lenders)
      if (auto lender = weak.lock()) lender->release();
    if (forward_depth > 0) return;
    release();
    for (auto* u : context_state->registered) u->release();
  } catch (const std::exception&) {
    // Communication failed: the exception that led here, or the next use, says so.
  }
}

bool Unit::hook_output(const at::Tensor& output) {
  if (CheckpointedForward::active() && !c10::GradMode::is_enabled()) return true;  // the second run hooks its own
  if (!c10::GradMode::is_enabled() || !output.requires_grad() || output.is_leaf()) return false;
  std::weak_ptr<Unit> weak = weak_from_this();
  output.register_hook([weak](const at::Tensor&) {
    if (auto unit = weak.lock()) unit->begin_backward();
  });
  return true;
}

void Unit::hook_input(const at::Tensor& input) {
  if (!has_frozen() || !c10::GradMode::is_enabled() || !input.requires_grad() || input.is_leaf()) return;
  ++input_hooks;
  std::weak_ptr<Unit> weak = weak_from_this();
  input.register_hook([weak](const at::Tensor&) {
    auto unit = weak.lock();
    if (!unit || unit->input_hooks == 0) return;
    if (--unit->input_hooks == 0 && unit->in_backward) unit->end_backward();
  });
}

void Unit::begin_backward() {
  if (in_backward) return;
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  context_state->current_pass();
  check_groups();
  for (const auto& g : groups) {
    if (g->shows_full_main())
      throw StateError(fmt::format("unit '{}': backward inside FullParameters; leave its scope first", display_name()));
  }
  for (auto& weak : lenders)
    if (auto lender = weak.lock()) lender->begin_backward();
  for (auto& g : groups)
    if (auto* gradients = g->gradients()) gradients->absorb_resting();
  ready.clear();
  for (auto& g : groups) ready.emplace_back(g->requires_grad() ? g->handles().size() : 0, false);
  callbacks = 0;
  in_backward = true;
  finish_unshard();
  if (context_state->prefetch_order == PrefetchOrder::kRecorded) context_state->recording_backward.push_back(this);
  prefetch(context_state->backward_prefetch_order(), schedule.backward_prefetch_size);
}

void Unit::on_gradient(size_t group, size_t parameter) {
  if (!in_backward) return;  // the tensor hook on the parameter made it so; only a failure in between leaves it unset
  ready[group][parameter] = true;
  ++callbacks;
  bool complete = schedule.grad_accumulation_count
                      ? callbacks >= *schedule.grad_accumulation_count
                      : std::all_of(ready.begin(), ready.end(), [](const auto& flags) {
                          return std::all_of(flags.begin(), flags.end(), [](bool f) { return f; });
                        });
  // A frozen weight beside trainable ones is still read by the gradient of the inputs.
  if (complete && has_frozen() && input_hooks > 0) complete = false;
  // Driven by hand: post_backward() says when, or the end of autograd where that began the backward.
  if (schedule.hooks == ExecutionHooks::kManual) complete = false;
  if (complete) end_backward();
}

void Unit::end_backward() {
  if (!in_backward) return;
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  Contribution contribution{shared_from_this(), {}, context_state->last_microbatch};
  for (auto& g : groups)
    contribution.gradients.push_back(g->gradients() ? g->gradients()->take_full() : FullGradients{});
  in_backward = false;
  input_hooks = 0;
  // Weights go before the packed gradients come: the peak is one of them, not both. A recompute or a forward that is
  // still running keeps them.
  release();
  if (trainable()) context_state->submit(std::move(contribution));
}

void Unit::abandon_backward() noexcept {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  const bool was = in_backward;
  in_backward = false;
  input_hooks = 0;
  armed = false;
  try {
    for (auto& g : groups) {
      if (!was || !g->gradients()) continue;
      for (const auto& h : g->handles())
        if (auto handle = h.lock(); handle.defined()) handle.mutable_grad() = at::Tensor();
    }
    release();
    if (was) install_gradients();
  } catch (const std::exception&) {
    // Communication failed: the next use says so.
  }
}

void Unit::install_gradients() {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  for (auto& g : groups)
    if (auto* gradients = g->gradients()) gradients->install();
}

std::string Unit::describe_text() const {
  auto text = fmt::format("unit '{}'\n", display_name());
  for (const auto& g : groups) text += g->describe();
  return text;
}

}  // namespace fsdp::detail

namespace fsdp {

using detail::unit_of;

const char* to_string(FsdpModule::Phase phase) {
  switch (phase) {
    case FsdpModule::Phase::kResting:
      return "resting";
    case FsdpModule::Phase::kForward:
      return "forward";
    case FsdpModule::Phase::kBackward:
      return "backward";
  }
  return "unknown";
}

namespace {
void expect_phase(const detail::Unit& unit, FsdpModule::Phase wanted, const char* call) {
  if (unit.phase() != wanted)
    throw StateError(fmt::format("unit '{}': {} expects phase {}, the unit is in phase {}", unit.display_name(), call,
                                 to_string(wanted), to_string(unit.phase())));
}
}  // namespace

FsdpModule::Phase FsdpModule::phase() const { return unit_of(*this).phase(); }

const std::string& FsdpModule::name() const {
  unit_of(*this).context_state->require_finalized("name()");
  return unit_of(*this).name;
}

bool FsdpModule::is_root() const {
  unit_of(*this).context_state->require_finalized("is_root()");
  return unit_of(*this).root;
}

FsdpContext& FsdpModule::context() { return unit_of(*this).context_handle; }

std::span<const ParameterGroup* const> FsdpModule::parameter_groups() const { return unit_of(*this).group_views; }

void FsdpModule::pre_forward() {
  auto& unit = unit_of(*this);
  if (unit.phase() != Phase::kBackward) expect_phase(unit, Phase::kResting, "pre_forward");
  unit.begin_forward(false);
}

void FsdpModule::post_forward() {
  auto& unit = unit_of(*this);
  if (unit.module_depth == 0) expect_phase(unit, Phase::kForward, "post_forward");
  if (c10::GradMode::is_enabled()) unit.armed = true;
  unit.end_forward(false);
}

void FsdpModule::pre_backward() {
  expect_phase(unit_of(*this), Phase::kResting, "pre_backward");
  unit_of(*this).context_state->require_finalized("pre_backward");
  unit_of(*this).begin_backward();
}

void FsdpModule::post_backward() {
  auto& unit = unit_of(*this);
  expect_phase(unit, Phase::kBackward, "post_backward");
  unit.end_backward();
  // Outside autograd no callback ends the pass: the last unit does.
  auto& context = *unit.context_state;
  const bool others =
      std::any_of(context.registered.begin(), context.registered.end(), [](const auto* u) { return u->in_backward; });
  if (!others && context.pass && context.pass->graph_task == -1) context.end_pass();
}

void FsdpModule::unshard() {
  auto& unit = unit_of(*this);
  unit.context_state->require_finalized("unshard");
  unit.check_groups();
  unit.finish_unshard();
  unit.held = true;
}

void FsdpModule::reshard() {
  auto& unit = unit_of(*this);
  unit.context_state->require_finalized("reshard");
  unit.held = false;
  unit.release();
}

bool FsdpModule::is_unsharded() const { return unit_of(*this).unsharded(); }

std::string FsdpModule::describe() const { return unit_of(*this).describe_text(); }

}  // namespace fsdp
