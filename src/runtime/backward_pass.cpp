#include <algorithm>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include "runtime/context_state.h"
#include "runtime/registry.h"
#include "runtime/unit.h"

namespace fsdp::detail {
namespace {

/// Lives in the graph task's list of final callbacks. When autograd ends with an exception the callback never runs, and
/// the list's destruction is the only sign.
struct PassGuard {
  std::weak_ptr<ContextState> context;
  bool ended = false;
  explicit PassGuard(std::weak_ptr<ContextState> c) : context(std::move(c)) {}
  PassGuard(const PassGuard&) = delete;
  PassGuard& operator=(const PassGuard&) = delete;
  ~PassGuard() {
    if (auto state = context.lock(); state && !ended) state->abandon_stale_pass();
  }
};

}  // namespace

BackwardPass& ContextState::current_pass() {
  if (pass) return *pass;
  finish_reduction();
  pass.emplace();
  pass->graph_task = torch::autograd::get_current_graph_task_id();
  for (auto* unit : reduction)
    if (unit->armed && unit->trainable()) pass->expected.push_back(unit);
  // A second backward over the same forward, or of a second loss.
  if (pass->expected.empty()) pass->expected = previous_expected;
  // Forwards begun by operators end here at the latest; what backward needs again stays gathered.
  for (auto* unit : std::exchange(operator_forwards, {})) {
    unit->leave_forward();
    if (!unit->armed) unit->release();
  }
  if (pass->graph_task != -1) {
    auto guard = std::make_shared<PassGuard>(weak_from_this());
    torch::autograd::Engine::get_default_engine().queue_callback([guard] {
      if (auto state = guard->context.lock()) state->end_pass();
      guard->ended = true;
    });
  }
  return *pass;
}

void ContextState::submit(Contribution contribution) {
  auto& p = current_pass();
  p.waiting.push_back(std::move(contribution));
  while (p.turn < p.expected.size()) {
    auto it = std::find_if(p.waiting.begin(), p.waiting.end(),
                           [&](const auto& c) { return c.unit.get() == p.expected[p.turn]; });
    if (it == p.waiting.end()) return;
    auto next = std::move(*it);
    p.waiting.erase(it);
    ++p.turn;
    reduce(std::move(next));
  }
}

void ContextState::reduce(Contribution contribution) {
  pass->reduced.push_back(contribution.unit);
  for (size_t g = 0; g < contribution.unit->groups.size(); ++g) {
    auto* gradients = contribution.unit->groups[g]->gradients();
    if (!gradients) continue;
    finish_reduction();
    reducing = gradients;
    reducing_unit = contribution.unit;
    gradients->start(std::move(contribution.gradients[g]), contribution.last, contribution.unit->label);
  }
}

void ContextState::finish_reduction() {
  auto unit = reducing_unit.lock();
  auto* gradients = std::exchange(reducing, nullptr);
  reducing_unit.reset();
  if (unit && gradients) gradients->finish();
}

void ContextState::end_pass() {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  // Parameters that got no gradient count as zero: their units are complete now.
  for (auto* unit : registered)
    if (unit->in_backward && !unit->trainable()) unit->end_backward();
  for (auto* unit : reduction)
    if (unit->in_backward) unit->end_backward();
  auto left = std::exchange(pass->waiting, {});
  auto position = [&](const Contribution& c) { return std::find(reduction.begin(), reduction.end(), c.unit.get()); };
  std::stable_sort(left.begin(), left.end(), [&](const auto& a, const auto& b) { return position(a) < position(b); });
  for (auto& contribution : left) reduce(std::move(contribution));

  auto reduced = pass->reduced;
  if (!policy.caller_managed_grad_sync) {
    finish_reduction();
    for (auto& weak : reduced)
      if (auto unit = weak.lock()) unit->install_gradients();
  } else {
    for (auto& weak : reduced) {
      auto unit = weak.lock();
      if (!unit) continue;
      for (auto& g : unit->groups)
        if (auto* gradients = g->gradients()) gradients->install_unreduced();
      unfinished.push_back(weak);
    }
  }
  previous_expected = pass->expected;
  pass.reset();
  for (auto* unit : registered) {
    unit->armed = false;
    unit->release();  // prefetched or gathered for a recompute, and not used since
  }
  if (!recording_forward.empty()) recorded_forward = std::exchange(recording_forward, {});
  if (!recording_backward.empty()) recorded_backward = std::exchange(recording_backward, {});
}

void ContextState::abandon_stale_pass() noexcept {
  if (!pass) return;
  if (pass->graph_task != -1 && torch::autograd::get_current_graph_task_id() == pass->graph_task) return;
  auto reduced = pass->reduced;
  pass.reset();
  if (auto unit = reducing_unit.lock(); unit && reducing) reducing->abandon();
  reducing = nullptr;
  reducing_unit.reset();
  recording_forward.clear();
  recording_backward.clear();
  for (auto* unit : registered) unit->abandon_backward();
  for (auto& weak : reduced)
    if (auto unit = weak.lock()) unit->install_gradients();
}

void ContextState::finish_gradients() {
  finish_reduction();
  for (auto& weak : std::exchange(unfinished, {})) {
    auto unit = weak.lock();
    if (!unit) continue;
    Unhooked unhooked;
    c10::NoGradGuard no_grad;
    for (auto& g : unit->groups) {
      auto* gradients = g->gradients();
      if (!gradients) continue;
      // What the user cleared in the meantime stays cleared.
      gradients->absorb_resting();
      gradients->install();
    }
  }
}

}  // namespace fsdp::detail
