/// Operators as hooks. Handles and full weights of every unit carry one more dispatch key, so any operator that takes
/// one of them, whoever calls it, enters `enter_operator` below: it gathers the unit, runs the operator, and hooks what
/// comes out so that backward is seen too. Operators on other tensors are not touched.
#include <algorithm>
#include <functional>
#include <string_view>
#include <unordered_set>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include "runtime/checkpointed_forward.h"
#include "runtime/registry.h"
#include "runtime/unit.h"

namespace fsdp::detail {
namespace {

using Stack = torch::jit::Stack;

void visit(const c10::IValue& value, const std::function<void(const at::Tensor&)>& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorList()) f(t);
  } else if (value.isList()) {
    for (const c10::IValue& e : value.toListRef()) visit(e, f);
  }
}

/// Operators that compute a layer's output. No optimizer or logger applies them to a parameter, so under no_grad in
/// training mode, where a resting parameter otherwise reads as its shard, they are a forward that was not announced.
bool is_layer_operator(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string_view> kNames = {"aten::linear",
                                                              "aten::matmul",
                                                              "aten::mm",
                                                              "aten::addmm",
                                                              "aten::bmm",
                                                              "aten::baddbmm",
                                                              "aten::mv",
                                                              "aten::addmv",
                                                              "aten::t",
                                                              "aten::bilinear",
                                                              "aten::embedding",
                                                              "aten::embedding_bag",
                                                              "aten::conv1d",
                                                              "aten::conv2d",
                                                              "aten::conv3d",
                                                              "aten::convolution",
                                                              "aten::conv_transpose1d",
                                                              "aten::conv_transpose2d",
                                                              "aten::conv_transpose3d",
                                                              "aten::conv_tbc",
                                                              "aten::layer_norm",
                                                              "aten::native_layer_norm",
                                                              "aten::batch_norm",
                                                              "aten::group_norm",
                                                              "aten::instance_norm",
                                                              "aten::rms_norm",
                                                              "aten::prelu",
                                                              "aten::lstm",
                                                              "aten::gru",
                                                              "aten::rnn_tanh",
                                                              "aten::rnn_relu",
                                                              "aten::lstm_cell",
                                                              "aten::gru_cell",
                                                              "aten::rnn_tanh_cell",
                                                              "aten::rnn_relu_cell",
                                                              "aten::scaled_dot_product_attention",
                                                              "aten::_native_multi_head_attention",
                                                              "aten::_transformer_encoder_layer_fwd",
                                                              "aten::einsum"};
  return kNames.contains(op.schema().name());
}

/// Operators that look at or change what a handle is, not at its values.
bool is_metadata_operator(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string_view> kNames = {
      "aten::set_data",    "aten::data",         "aten::is_leaf",
      "aten::output_nr",   "aten::_version",     "aten::requires_grad_",
      "aten::retain_grad", "aten::retains_grad", "aten::_has_compatible_shallow_copy_type"};
  return kNames.contains(op.schema().name());
}

struct Use {
  std::shared_ptr<Unit> unit;
  bool handle_written = false;  // this parameter itself is only written
  bool by_storage = false;
};

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool module_training(const Unit& unit) { return unit.module_alive.expired() || unit.module->is_training(); }

/// True when the operator runs as part of an operator-driven forward (or recompute), so that its outputs get hooks.
bool gather_for(const Use& use, const c10::OperatorHandle& op) {
  auto& unit = *use.unit;
  auto& context = *unit.context_state;
  if (unit.module_depth > 0) return false;
  const bool grad = c10::GradMode::is_enabled();
  if (torch::autograd::get_current_graph_task_id() != -1) {
    // Backward reads a saved weight, or a recompute uses one: it stays gathered until the unit's backward or the end.
    if (!unit.unsharded()) {
      context.current_pass();
      unit.finish_unshard();
    }
    return grad;
  }
  if (use.handle_written && unit.forward_depth == 0) return false;
  const bool driven = std::find(context.operator_forwards.begin(), context.operator_forwards.end(), &unit) !=
                      context.operator_forwards.end();
  if (driven) {
    context.end_operator_forwards(&unit);
    return true;
  }
  if (use.by_storage) {
    // A view of full weights that outlived its forward. Weights that are always whole need nothing.
    const bool released = std::any_of(unit.groups.begin(), unit.groups.end(), [](const auto& g) {
      return g->full_elements() > 0 && g->full_storage().nbytes() == 0;
    });
    if (!released) return false;
  }
  const auto hooks = unit.schedule.hooks;
  const bool automatic = hooks == ExecutionHooks::kAuto || hooks == ExecutionHooks::kOperator;
  const bool acts = grad || !module_training(unit) || context.forward_scopes > 0 || CheckpointedForward::active();
  if (acts && !automatic && !unit.held)
    throw StateError(
        fmt::format("unit '{}': operator {} uses its parameters outside its forward, and its hooks are {}; call "
                    "{}, or shard it with ExecutionHooks::kAuto",
                    unit.display_name(), op.schema().name(), hooks == ExecutionHooks::kModule ? "kModule" : "kManual",
                    hooks == ExecutionHooks::kModule ? "the module's forward" : "pre_forward() first"));
  if (!acts) {
    if (!is_layer_operator(op)) return false;  // reads the shard
    throw StateError(
        fmt::format("unit '{}': {} on its resting parameters under no_grad in training mode would compute with "
                    "this rank's shard; call eval(), open fsdp::forward_scope(ctx), or use FullParameters",
                    unit.display_name(), op.schema().name()));
  }
  if (!automatic) return false;
  unit.begin_forward(true);
  context.operator_forwards.push_back(&unit);
  return true;
}

/// The result of an operator on a gradient that is not reduced yet: clearing it is fine, which zero_grad(false) does by
/// detaching and zeroing; anything else is refused.
at::Tensor on_unreduced_gradient(const c10::OperatorHandle& op, const at::Tensor& gradient, const Unit* unit) {
  const auto& name = op.schema().name();
  if (name == "aten::detach_") return gradient;
  if (name == "aten::detach" || name == "aten::alias") {
    auto copy = gradient.variable_data();
    add_hook_key(copy);
    return copy;
  }
  if (name == "aten::zero_") {
    auto zeros = at::zeros(gradient.sizes(), gradient.options());
    gradient.unsafeGetTensorImpl()->shallow_copy_from(zeros.getIntrusivePtr());
    return gradient;
  }
  throw StateError(
      fmt::format("unit '{}': {} reads a gradient that is not reduced: the last backward ran in "
                  "microbatch(ctx, false), or finish_grad_sync() is due. Run the last microbatch of a step in "
                  "microbatch(ctx, true) before the optimizer, or clear the gradients",
                  unit ? unit->display_name() : "?", name));
}

void enter_operator(const c10::OperatorHandle& op, Stack* stack) {
  Unhooked unhooked;
  const auto& arguments = op.schema().arguments();
  if (is_metadata_operator(op)) {
    op.callBoxed(stack);
    return;
  }
  std::vector<Use> uses;
  const auto first = stack->size() - arguments.size();
  at::Tensor result;  // when the operator must not run
  for (size_t a = 0; a < arguments.size() && !result.defined(); ++a)
    visit((*stack)[first + a], [&](const at::Tensor& t) {
      if (!has_hook_key(t)) return;
      auto managed = registry::find(t);
      if (managed.kind == Managed::Kind::kNone) return;
      if (managed.kind == Managed::Kind::kUnreducedGradient) {
        result = on_unreduced_gradient(op, t, managed.unit.get());
        return;
      }
      if (!managed.unit) return;
      if (managed.kind != Managed::Kind::kHandle && writes(arguments[a])) {
        // `p.data().add_(...)`, as torch::optim::SGD does it, moves no version counter that the handle shares.
        for (auto& group : managed.unit->groups)
          if (group->main_weight().local_buffer().is_alias_of(t)) group->invalidate();
      }
      if (managed.kind == Managed::Kind::kMainStorage) return;
      Use use{managed.unit, managed.kind == Managed::Kind::kHandle && writes(arguments[a]),
              managed.kind == Managed::Kind::kFullStorage};
      auto same = std::find_if(uses.begin(), uses.end(), [&](const auto& u) { return u.unit == use.unit; });
      if (same == uses.end()) {
        uses.push_back(std::move(use));
      } else {
        same->handle_written = same->handle_written && use.handle_written;
        same->by_storage = same->by_storage && use.by_storage;
      }
    });
  if (result.defined()) {
    torch::jit::drop(*stack, arguments.size());
    stack->emplace_back(std::move(result));
    return;
  }

  std::vector<Unit*> hooked;
  for (const auto& use : uses)
    if (gather_for(use, op)) hooked.push_back(use.unit.get());
  try {
    op.callBoxed(stack);
  } catch (...) {
    for (auto* unit : hooked)
      if (std::erase(unit->context_state->operator_forwards, unit)) unit->abort_forward(true);
    throw;
  }
  const auto results = op.schema().returns().size();
  for (auto r = stack->size() - results; r < stack->size(); ++r)
    visit((*stack)[r], [&](const at::Tensor& t) {
      if (t.has_storage() && registry::find(t).kind == Managed::Kind::kFullStorage) {
        // A view of full weights: what uses it next uses the unit.
        if (!uses.empty()) add_hook_key(t);
        return;
      }
      for (auto* unit : hooked)
        if (unit->hook_output(t)) unit->armed = true;
    });
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&enter_operator>()); }

void link_operator_hooks() {}

}  // namespace fsdp::detail
