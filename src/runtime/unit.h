#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/context.h>
#include <fsdp/module.h>
#include <fsdp/schedule_policy.h>

#include "runtime/context_state.h"
#include "runtime/group.h"
#include "runtime/shard_request.h"

namespace fsdp::detail {

/// One FSDP unit: when its groups are gathered, released and reduced. Public functions of FsdpModule and all hooks end
/// here. What keeps the weights gathered: a forward that runs through the unit (forward_depth), its backward
/// (in_backward), unshard() by hand, or being needed soon (prefetch, recompute), which the end of backward clears.
struct Unit final : FsdpModule, std::enable_shared_from_this<Unit> {
  Unit(std::shared_ptr<ContextState> context, torch::nn::Module& module, SchedulePolicy schedule);
  ~Unit() override;

  // ---- set up by fully_shard and finalize
  std::shared_ptr<ContextState> context_state;
  FsdpContext context_handle;
  torch::nn::Module* module;  // for training mode and the tree; valid while module_alive is
  std::weak_ptr<torch::nn::Module> module_alive;
  SchedulePolicy schedule;
  ForwardCasts casts;
  bool root_keeps_weights = false;  // as in ShardRequest; applied to the schedule when roots are known
  std::optional<DeviceMesh> mesh;   // data-parallel axes
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<const ParameterGroup*> group_views;
  std::vector<std::weak_ptr<Unit>> lenders;  // units that own a weight tied into this one
  std::string name;                          // from the root; valid once finalized
  std::string label;                         // what collectives carry: as name, but no two units of a context share it
  std::string local_name;                    // until then: the module's type, for messages
  Unit* parent = nullptr;
  std::vector<Unit*> children;
  bool root = false;
  std::string signature;  // what all ranks must agree on, a line per parameter; checked at finalize

  // ---- state
  int forward_depth = 0;  // forwards running through the unit now
  int module_depth = 0;   // of these, begun by module hooks or by hand
  bool in_backward = false;
  bool held = false;                     // unshard() by hand
  bool armed = false;                    // ran a forward whose backward has not come
  std::vector<std::vector<bool>> ready;  // per group and parameter: gradient accumulated in this backward
  int64_t callbacks = 0;                 // gradient callbacks in this backward
  int input_hooks = 0;                   // inputs of this forward that need a gradient and have not got it

  Phase phase() const;
  const std::string& display_name() const { return context_state->finalized ? name : local_name; }
  bool unsharded() const;
  bool holds_weights() const;
  bool trainable() const;
  bool has_frozen() const;
  int64_t payload() const;
  bool is_ancestor_of(const Unit& other) const;
  struct Place {
    Group* group;
    size_t index;  // in the group
  };
  /// Where an owned parameter is.
  Place find(const c10::TensorImpl* handle) const;
  /// StateError naming a parameter that cannot be used: replaced behind the library's back, or without values.
  void check_groups() const;

  // ---- weights
  void start_unshard();
  void finish_unshard();
  /// Releases the weights unless something still needs them.
  void release();
  void release_now();

  // ---- events
  void begin_forward(bool by_operator);
  void end_forward(bool by_operator);
  void abort_forward(bool by_operator) noexcept;
  /// One forward less runs through this unit and through those that lend it weights. Releases nothing.
  void leave_forward() noexcept;
  /// Hooks one output of a forward, so that its gradient starts the unit's backward. True if that will come.
  bool hook_output(const at::Tensor& output);
  void hook_input(const at::Tensor& input);
  void begin_backward();
  void on_gradient(size_t group, size_t parameter);
  void end_backward();
  void prefetch(const std::vector<Unit*>& order, const std::optional<int64_t>& budget);
  /// Ends a backward that an exception cut short: gradients at rest and weights as before it.
  void abandon_backward() noexcept;
  void install_gradients();

  std::string describe_text() const;
};

Unit& unit_of(FsdpModule& module);
const Unit& unit_of(const FsdpModule& module);

}  // namespace fsdp::detail
