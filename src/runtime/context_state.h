#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/context.h>
#include <fsdp/module.h>

#include "runtime/gradients.h"
#include "runtime/storage_pool.h"

namespace fsdp::detail {

struct Unit;

/// What one unit's backward hands to the reduction: full gradients per group, and whether they close a step.
struct Contribution {
  std::shared_ptr<Unit> unit;
  std::vector<FullGradients> gradients;
  bool last = true;
};

/// One run of autograd through units of a context. Reductions go out in the context's static order, so that every rank
/// issues the same collectives in the same order whatever autograd's order was: a unit whose turn has not come waits,
/// until its predecessors are done or the run ends.
struct BackwardPass {
  int graph_task = -1;
  std::vector<Unit*> expected;  // units that ran forward for it, in static order
  size_t turn = 0;
  std::vector<Contribution> waiting;
  std::vector<std::weak_ptr<Unit>> reduced;  // units whose gradients changed
};

/// State shared by the units of one context. Units hold it; it holds them weakly (by raw pointers that they remove when
/// they go).
struct ContextState : std::enable_shared_from_this<ContextState> {
  ContextState(c10::Device device, RuntimePolicy policy, OwnerMap owners, PrefetchOrder order);

  c10::Device device;
  RuntimePolicy policy;
  OwnerMap owners;
  PrefetchOrder prefetch_order;
  std::shared_ptr<StoragePool> pool;

  bool finalized = false;
  bool finalize_at_first_forward = false;  // nobody holds a handle to call finalize()
  bool last_microbatch = true;
  int forward_scopes = 0;
  std::vector<Unit*> registered;  // in order of construction
  std::vector<Unit*> roots, forward, backward;
  std::vector<Unit*> reduction;  // static order of reductions: each unit after the units inside it

  std::vector<Unit*> operator_forwards;  // forwards begun by operators, outermost first
  std::optional<BackwardPass> pass;
  std::vector<Unit*> previous_expected;
  Gradients* reducing = nullptr;      // the reduction that is under way: at most one, so that memory stays bounded
  std::weak_ptr<Unit> reducing_unit;  // owner of it
  std::vector<std::weak_ptr<Unit>> unfinished;  // caller-managed sync: gradients that finish_grad_sync() makes readable
  std::vector<Unit*> recorded_forward, recorded_backward;  // PrefetchOrder::kRecorded
  std::vector<Unit*> recording_forward, recording_backward;

  void require_finalized(const char* what) const;
  void finalize();
  void forget(Unit* unit);
  void compute_orders();
  void check_ranks_agree();

  const std::vector<Unit*>& forward_prefetch_order() const;
  const std::vector<Unit*>& backward_prefetch_order() const;

  // ---- operator-driven forwards
  /// Ends operator-driven forwards until the innermost left is an ancestor of `unit` (or, with nullptr, all of them).
  void end_operator_forwards(const Unit* unit);

  // ---- backward
  BackwardPass& current_pass();
  void submit(Contribution contribution);
  void end_pass();
  void abandon_stale_pass() noexcept;
  void reduce(Contribution contribution);
  void finish_reduction();
  void finish_gradients();
};

/// The context active on this thread.
FsdpContext*& active_context();

}  // namespace fsdp::detail
