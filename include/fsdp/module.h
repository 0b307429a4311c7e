#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/context.h>
#include <fsdp/parameter_group.h>

namespace torch::nn {
class Module;
}

namespace fsdp {

/// An FSDP unit: the state that fully_shard attaches to a module. Owned by the module (by its parameters where the
/// module is not Hooked). Belongs to one rank's thread; backward may run on an autograd thread.
class FsdpModule {
 public:
  enum class Phase { kResting, kForward, kBackward };

  FsdpModule(const FsdpModule&) = delete;
  FsdpModule& operator=(const FsdpModule&) = delete;
  virtual ~FsdpModule() = default;

  Phase phase() const;
  /// Dotted path from the root unit; "" for a root. StateError before the context is finalized.
  const std::string& name() const;
  bool is_root() const;
  FsdpContext& context();
  std::span<const ParameterGroup* const> parameter_groups() const;

  /// What the hooks call; for ExecutionHooks::kManual and special methods. Each is collective when it has to gather or
  /// reduce. StateError for a transition that is not resting-forward-resting or resting-backward-resting.
  void pre_forward();
  void post_forward();
  void pre_backward();
  void post_backward();
  /// Gathers (collective) or releases the unit's weights by hand. unshard() holds until reshard().
  void unshard();
  void reshard();
  bool is_unsharded() const;

  /// The unit's groups: layout, placements, and the collectives of one step with their bytes.
  std::string describe() const;

 protected:
  FsdpModule() = default;
};

const char* to_string(FsdpModule::Phase phase);

/// Each physical parameter of a module once, under its first name: LibTorch's parameters() lists a tied weight once
/// per name, and an optimizer built from that steps it twice.
std::vector<at::Tensor> parameters(torch::nn::Module& module);

/// RAII: the parameters of a module and its descendants are the full tensors, in the optimizer's dtype, until
/// destruction. Collective. With write_back the destructor copies this rank's own rows from the full values (local, no
/// communication): all ranks must have written the same. StateError in the middle of a forward or backward. Forward
/// under it is for no-grad use and sees the weights from before any write.
class FullParameters {
 public:
  explicit FullParameters(torch::nn::Module& module, bool write_back = false);
  ~FullParameters();
  FullParameters(const FullParameters&) = delete;
  FullParameters& operator=(const FullParameters&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp
