#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <fsdp/adamw.h>
#include <fsdp/error.h>

namespace fsdp {

/// Norm of all gradients over all ranks, and scaling of this rank's gradients so that it becomes at most max_norm.
/// `parameters` may hold sharded, replicated and ordinary (unmanaged) parameters; each gradient element counts once.
/// Collective: one scalar all-reduce over the meshes involved, nothing is gathered. Every rank returns the same 0-dim
/// fp32 (fp64 if a gradient is) tensor. Undefined gradients count as nothing. ValueError: max_norm or norm_type not
/// positive (infinity is a norm_type). StateError: a gradient is not reduced yet (the last backward was not in
/// microbatch(ctx, true)); with error_if_nonfinite a norm that is not finite, on all ranks and before scaling.
at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false);

namespace detail {
/// Puts gradients of another dtype than their parameter aside for the length of an optimizer step, with copies of the
/// parameter's dtype in their place.
class CastGradients {
 public:
  explicit CastGradients(const std::vector<torch::optim::OptimizerParamGroup>& groups);
  ~CastGradients();
  CastGradients(const CastGradients&) = delete;
  CastGradients& operator=(const CastGradients&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  // parameter, its own gradient
};
}  // namespace detail

/// `Base` (torch::optim::AdamW, SGD, ...) that steps with gradients cast to each parameter's dtype, which LibTorch's
/// optimizers expect; needed only where main_grads_dtype differs from main_params_dtype. The gradients themselves are
/// put back after the step.
template <class Base>
class FullyShardOptimizer : public Base {
 public:
  using Base::Base;

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      // Base would call the closure itself, after the cast: its backward would then write into the copies.
      c10::AutoGradMode enable(true);
      loss = closure();
    }
    detail::CastGradients cast(this->param_groups());
    Base::step(nullptr);
    return loss;
  }
};

}  // namespace fsdp
