#pragma once

#include <memory>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>

namespace fsdp::optim {

/// torch::optim::AdamW, to rounding, in one pass over each parameter group's flat shard instead of a dozen over each
/// parameter. Options, parameter groups, schedulers, closures, save() and load() are torch's; the moments are views of
/// one flat buffer per group. Parameters that no unit owns, and groups of which only some parameters have gradients,
/// are stepped one by one with the same kernel. Gradients of another dtype than their weight are converted on the way.
/// No communication. StateError for a gradient that is not reduced yet, before anything is written.
class AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  ~AdamW() override;

  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  struct Flat;
  struct Batch;
  void collect(torch::optim::OptimizerParamGroup& group, Batch& batch);
  torch::optim::AdamWParamState& state_of(const at::Tensor& parameter);

  std::unordered_map<const void*, std::shared_ptr<Flat>> flat_;  // by the group's main weights; shared: Flat is private
};

}  // namespace fsdp::optim
