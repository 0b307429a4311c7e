#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>

#include <fsdp/error.h>

namespace fsdp {

class FsdpModule;
namespace detail {
struct ContextState;
}

/// How the units of one context communicate.
struct RuntimePolicy {
  bool use_symmetric_memory = false;         ///< CUDA only; StateError elsewhere
  bool overlap_allgather_reduction = true;   ///< false: gathers and reductions share one communicator, smaller peak
  bool overlap_outer_communication = false;  ///< CUDA: reductions over outer axes run on a stream of their own
  bool caller_managed_grad_sync = false;     ///< backward does not wait for its reductions: call finish_grad_sync()
  enum class GradReduction {
    kEveryMicrobatch,  ///< reduce each microbatch as far as the gradient placement says: gradients stay sharded
    kLastMicrobatch,   ///< accumulate whole gradients, reduce once: less communication, more memory
  } grad_reduction = GradReduction::kEveryMicrobatch;
};

/// Where the prefetch order of units comes from.
enum class PrefetchOrder {
  kRegistration,  ///< the module tree: pre-order, children in registration order
  kRecorded,      ///< the order of the last complete forward or backward, where there is one
};

/// Owner rank of each parameter that TensorAtomic places, keyed by the parameter's handle.
using OwnerMap = std::unordered_map<const c10::TensorImpl*, int64_t>;

/// Bytes that a context's units hold beside their persistent buffers: gathered weights, gradients being reduced, and
/// gradients accumulated before their reduction. Full gradients as autograd makes them are not counted.
struct TransientMemory {
  int64_t bytes = 0;         ///< in use now
  int64_t peak_bytes = 0;    ///< most in use at once, since construction or reset_peak_memory()
  int64_t pooled_bytes = 0;  ///< allocated but idle, kept for the next use (CPU only)
};

/// Handle to the state that the FSDP units of one model share: prefetch orders, the microbatch flag, outstanding
/// communication. Modules keep that state alive, so the handle may go first. Belongs to one rank's thread.
class FsdpContext {
 public:
  /// StateError when use_symmetric_memory is asked for on a device without it.
  explicit FsdpContext(c10::Device device, RuntimePolicy policy = {}, OwnerMap parameter_to_owner = {},
                       PrefetchOrder order = PrefetchOrder::kRegistration);
  FsdpContext(FsdpContext&&) noexcept;
  FsdpContext& operator=(FsdpContext&&) noexcept;
  FsdpContext(const FsdpContext&) = delete;
  FsdpContext& operator=(const FsdpContext&) = delete;
  ~FsdpContext();

  /// Fixes roots, names and orders, and checks that all ranks built the same model with the same initial values (one
  /// small collective per mesh). No unit runs before it, none joins after it. Collective. StateError if already
  /// finalized, or naming the first unit and parameter that differ between ranks.
  void finalize();
  bool is_finalized() const;
  /// True outside any microbatch scope.
  bool is_last_microbatch() const;
  /// Recomputes compute weights of every unit from the optimizer's weights at their next use: needed after writes the
  /// version counter can't see (`.data()`). Returns the number of parameter groups marked. StateError in the middle of
  /// a forward or backward.
  int64_t sync_model_weights();
  /// Orders later work on the current stream (CUDA) or thread (CPU) after every reduction submitted so far, and makes
  /// the gradients of sharded units readable. CommError if one failed.
  void finish_grad_sync();

  /// Units in the order prefetch follows. StateError before finalize().
  std::vector<FsdpModule*> forward_order() const;
  std::vector<FsdpModule*> backward_order() const;
  /// Units that lie under no other unit of this context, in order of construction.
  std::vector<FsdpModule*> roots() const;

  TransientMemory transient_memory() const;
  void reset_peak_memory();

  const std::shared_ptr<detail::ContextState>& state() const { return state_; }
  /// Another handle to existing state (for the library's own use).
  explicit FsdpContext(std::shared_ptr<detail::ContextState> state);

 private:
  std::shared_ptr<detail::ContextState> state_;
};

namespace detail {
/// Activates without finalizing at the end.
class ActiveContext {
 public:
  explicit ActiveContext(FsdpContext& context);
  ~ActiveContext();
  ActiveContext(const ActiveContext&) = delete;
  ActiveContext& operator=(const ActiveContext&) = delete;
};
}  // namespace detail

/// Keeps a context active on this thread: `fully_shard` joins it. Finalizes the context when it ends without an
/// exception in flight; an error from that is thrown from the destructor (use the function overload of
/// fully_shard_context where that is unwanted).
class ContextScope {
 public:
  explicit ContextScope(FsdpContext& context);
  ~ContextScope() noexcept(false);
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  std::unique_ptr<detail::ActiveContext> active_;
  FsdpContext* context_;
  int exceptions_;
};

/// StateError when a scope is already active on this thread (contexts do not nest), or the context is finalized.
[[nodiscard]] ContextScope fully_shard_context(FsdpContext& context);

/// Runs `body` with the context active, then finalizes. Everything thrown reaches the caller.
template <class F>
void fully_shard_context(FsdpContext& context, F&& body);

/// The innermost context active on this thread, or nullptr.
FsdpContext* current_fully_shard_context();

/// Sets is_last_microbatch for its lifetime; the backward call must lie inside, since the flag is read there.
class MicrobatchScope {
 public:
  MicrobatchScope(FsdpContext& context, bool is_last);
  ~MicrobatchScope();
  MicrobatchScope(const MicrobatchScope&) = delete;
  MicrobatchScope& operator=(const MicrobatchScope&) = delete;

 private:
  std::shared_ptr<detail::ContextState> state_;
  bool previous_;
};

/// StateError before the context is finalized.
[[nodiscard]] MicrobatchScope microbatch(FsdpContext& context, bool is_last);

/// Operator hooks act in no-grad training mode too, for its lifetime.
class ForwardScope {
 public:
  explicit ForwardScope(FsdpContext& context);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  std::shared_ptr<detail::ContextState> state_;
};
[[nodiscard]] ForwardScope forward_scope(FsdpContext& context);

template <class F>
void fully_shard_context(FsdpContext& context, F&& body) {
  {
    detail::ActiveContext active(context);
    std::forward<F>(body)();
  }
  context.finalize();
}

}  // namespace fsdp
