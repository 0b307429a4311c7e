#include <fsdp/context.h>

#include <algorithm>
#include <exception>

#include <fmt/format.h>

#include "runtime/context_state.h"
#include "runtime/unit.h"

namespace fsdp {
namespace detail {

FsdpContext*& active_context() {
  thread_local FsdpContext* active = nullptr;
  return active;
}

ContextState::ContextState(c10::Device d, RuntimePolicy p, OwnerMap o, PrefetchOrder order)
    : device(d), policy(p), owners(std::move(o)), prefetch_order(order), pool(std::make_shared<StoragePool>(d)) {}

void ContextState::require_finalized(const char* what) const {
  if (!finalized)
    throw StateError(
        fmt::format("{} needs a finalized context: leave the fully_shard_context scope without an exception, "
                    "or call FsdpContext::finalize()",
                    what));
}

void ContextState::finalize() {
  if (finalized) throw StateError("the context is finalized already");
  compute_orders();
  check_ranks_agree();
  for (auto* unit : roots)
    if (unit->root_keeps_weights) unit->schedule.reshard_after_forward = false;
  finalized = true;
}

void ContextState::forget(Unit* unit) {
  for (auto* list : {&registered, &roots, &forward, &backward, &reduction, &operator_forwards, &recorded_forward,
                     &recorded_backward, &recording_forward, &recording_backward, &previous_expected})
    std::erase(*list, unit);
  if (pass) std::erase(pass->expected, unit);
  for (auto* other : registered) {
    std::erase(other->children, unit);
    if (other->parent == unit) other->parent = unit->parent;
  }
}

const std::vector<Unit*>& ContextState::forward_prefetch_order() const {
  return recorded_forward.empty() ? forward : recorded_forward;
}

const std::vector<Unit*>& ContextState::backward_prefetch_order() const {
  return recorded_backward.empty() ? backward : recorded_backward;
}

void ContextState::end_operator_forwards(const Unit* unit) {
  while (!operator_forwards.empty()) {
    auto* top = operator_forwards.back();
    if (unit && (top == unit || top->is_ancestor_of(*unit))) return;
    operator_forwards.pop_back();
    top->end_forward(true);
  }
}

ActiveContext::ActiveContext(FsdpContext& context) {
  if (active_context())
    throw StateError("fully_shard_context: a context is active on this thread already; contexts do not nest");
  if (context.is_finalized()) throw StateError("fully_shard_context: the context is finalized; construct a new one");
  active_context() = &context;
}

ActiveContext::~ActiveContext() { active_context() = nullptr; }

namespace {
std::vector<FsdpModule*> as_modules(const std::vector<Unit*>& units) { return {units.begin(), units.end()}; }
}  // namespace

}  // namespace detail

FsdpContext::FsdpContext(c10::Device device, RuntimePolicy policy, OwnerMap owners, PrefetchOrder order) {
  if (policy.use_symmetric_memory && device.is_cpu())
    throw StateError("RuntimePolicy::use_symmetric_memory needs CUDA devices; the context's device is cpu");
  state_ = std::make_shared<detail::ContextState>(device, policy, std::move(owners), order);
}

FsdpContext::FsdpContext(std::shared_ptr<detail::ContextState> state) : state_(std::move(state)) {}
FsdpContext::FsdpContext(FsdpContext&&) noexcept = default;
FsdpContext& FsdpContext::operator=(FsdpContext&&) noexcept = default;
FsdpContext::~FsdpContext() = default;

void FsdpContext::finalize() { state_->finalize(); }

bool FsdpContext::is_finalized() const { return state_->finalized; }
bool FsdpContext::is_last_microbatch() const { return state_->last_microbatch; }

int64_t FsdpContext::sync_model_weights() {
  int64_t groups = 0;
  for (auto* unit : state_->registered)
    if (unit->phase() != FsdpModule::Phase::kResting)
      throw StateError(fmt::format("sync_model_weights: unit '{}' is in phase {}; call it between steps",
                                   unit->display_name(), to_string(unit->phase())));
  for (auto* unit : state_->registered)
    for (auto& group : unit->groups) {
      group->values_written();
      ++groups;
    }
  return groups;
}

void FsdpContext::finish_grad_sync() { state_->finish_gradients(); }

std::vector<FsdpModule*> FsdpContext::forward_order() const {
  state_->require_finalized("forward_order()");
  return detail::as_modules(state_->forward);
}
std::vector<FsdpModule*> FsdpContext::backward_order() const {
  state_->require_finalized("backward_order()");
  return detail::as_modules(state_->backward);
}
std::vector<FsdpModule*> FsdpContext::roots() const {
  state_->require_finalized("roots()");
  return detail::as_modules(state_->roots);
}

TransientMemory FsdpContext::transient_memory() const {
  const auto& pool = *state_->pool;
  return {static_cast<int64_t>(pool.used_bytes()), static_cast<int64_t>(pool.peak_bytes()),
          static_cast<int64_t>(pool.idle_bytes())};
}

void FsdpContext::reset_peak_memory() { state_->pool->reset_peak(); }

ContextScope::ContextScope(FsdpContext& context)
    : active_(std::make_unique<detail::ActiveContext>(context)),
      context_(&context),
      exceptions_(std::uncaught_exceptions()) {}

ContextScope::~ContextScope() noexcept(false) {
  active_.reset();
  if (std::uncaught_exceptions() == exceptions_) context_->finalize();
}

ContextScope fully_shard_context(FsdpContext& context) { return ContextScope(context); }

FsdpContext* current_fully_shard_context() { return detail::active_context(); }

MicrobatchScope::MicrobatchScope(FsdpContext& context, bool is_last) : state_(context.state()) {
  if (!state_->finalize_at_first_forward) state_->require_finalized("microbatch");
  previous_ = std::exchange(state_->last_microbatch, is_last);
}

MicrobatchScope::~MicrobatchScope() { state_->last_microbatch = previous_; }

MicrobatchScope microbatch(FsdpContext& context, bool is_last) { return MicrobatchScope(context, is_last); }

ForwardScope::ForwardScope(FsdpContext& context) : state_(context.state()) { ++state_->forward_scopes; }
ForwardScope::~ForwardScope() { --state_->forward_scopes; }
ForwardScope forward_scope(FsdpContext& context) { return ForwardScope(context); }

}  // namespace fsdp
