#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/fsdp.h>
#include <torch/torch.h>

namespace fsdp::testing {

/// Values that depend on position only: no generator, so every rank and the reference agree.
inline void fill_by_formula(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  int64_t k = 0;
  for (auto& p : fsdp::parameters(module)) {
    auto i = torch::arange(p.numel(), torch::kDouble);
    p.copy_((torch::sin(i * 0.37 + static_cast<double>(k)) * 0.3).view(p.sizes()));
    ++k;
  }
}

inline torch::Tensor wave(std::vector<int64_t> sizes, double seed) {
  int64_t n = 1;
  for (auto s : sizes) n *= s;
  return torch::cos(torch::arange(n, torch::kDouble) * 0.11 + seed).view(sizes).to(torch::kFloat);
}

/// One weight; forward(c) = c * sum(w), so the gradient of every element is exactly c.
struct ProbeImpl : torch::nn::Module {
  torch::Tensor weight;
  ProbeImpl(int64_t n, int64_t m, torch::ScalarType type = torch::kFloat) {
    weight = register_parameter("weight", torch::ones({n, m}, type));
  }
  torch::Tensor forward(double c) { return (weight * c).sum(); }
};
FSDP_MODULE(Probe);

struct BlockImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  BlockImpl(int64_t width, int64_t hidden) {
    up = register_module("up", torch::nn::Linear(width, hidden));
    down = register_module("down", torch::nn::Linear(hidden, width));
  }
  torch::Tensor forward(torch::Tensor x) { return down(torch::relu(up(x))); }
};
FSDP_MODULE(Block);

/// Blocks of Linear(6, 10), ReLU, Linear(10, 6) and a head Linear(6, 3).
struct MlpImpl : torch::nn::Module {
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Linear head{nullptr};
  explicit MlpImpl(int64_t layers) {
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < layers; ++i) blocks->push_back(Block(6, 10));
    head = register_module("head", torch::nn::Linear(6, 3));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& b : *blocks) x = x + b->as<Block>()->forward(x);
    return head(x);
  }
};
FSDP_MODULE(Mlp);

inline std::shared_ptr<Mlp::Impl> make_mlp(int64_t layers) {
  auto model = std::make_shared<Mlp::Impl>(layers);
  fill_by_formula(*model);
  return model;
}

/// Every block and the root.
inline void shard_mlp(Mlp::Impl& model, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& placements,
                      MixedPrecisionPolicy precision = {}, double grad_scale = 1.0, SchedulePolicy schedule = {},
                      ShardLayout layout = ShardLayout::kPadded) {
  auto scope = fully_shard_context(ctx);
  for (auto& b : *model.blocks) fully_shard(*b, mesh, placements, precision, grad_scale, schedule, layout);
  fully_shard(model, mesh, placements, precision, grad_scale, schedule, layout);
}

inline torch::Tensor mlp_loss(Mlp::Impl& model, const torch::Tensor& x, const torch::Tensor& target) {
  return torch::mse_loss(model.forward(x), target);
}

/// Full parameters, cloned, by name.
inline std::vector<torch::Tensor> gathered(torch::nn::Module& module) {
  FullParameters full(module);
  std::vector<torch::Tensor> values;
  for (auto& p : fsdp::parameters(module)) values.push_back(p.detach().clone());
  return values;
}

struct Run {
  std::vector<double> losses;
  std::vector<torch::Tensor> weights;
};

/// Data of (step, microbatch, rank); the reference sees all ranks' rows.
constexpr int64_t kRows = 2;
inline torch::Tensor input_of(int64_t step, int64_t micro, int64_t rank) {
  return wave({kRows, 6}, 1.0 + 0.7 * static_cast<double>(step) + 0.3 * static_cast<double>(micro) +
                              0.1 * static_cast<double>(rank));
}
inline torch::Tensor target_of(int64_t step, int64_t micro, int64_t rank) {
  return wave({kRows, 3}, 5.0 + 0.2 * static_cast<double>(step) + 0.5 * static_cast<double>(micro) +
                              0.9 * static_cast<double>(rank));
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;
inline std::unique_ptr<torch::optim::Optimizer> sgd(std::vector<torch::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
}

/// The unsharded model in one process on the whole batch: the mean over ranks of their mean losses.
inline Run reference_run(int64_t ranks, int64_t layers, int64_t steps, int64_t micro, bool set_to_none = true,
                         const MakeOptimizer& make = sgd) {
  auto model = make_mlp(layers);
  auto optimizer = make(fsdp::parameters(*model));
  Run run;
  for (int64_t s = 0; s < steps; ++s) {
    optimizer->zero_grad(set_to_none);
    double total = 0;
    for (int64_t m = 0; m < micro; ++m)
      for (int64_t r = 0; r < ranks; ++r) {
        auto loss = mlp_loss(*model, input_of(s, m, r), target_of(s, m, r)) / static_cast<double>(micro * ranks);
        loss.backward();
        total += loss.item<double>();
      }
    optimizer->step();
    run.losses.push_back(total);
  }
  for (auto& p : model->parameters()) run.weights.push_back(p.detach().clone());
  return run;
}

inline double mean_over_ranks(const DeviceMesh& mesh, double value) {
  auto t = torch::tensor({value}, torch::kDouble);
  mesh.communicator_all(Channel::kControl).all_reduce(t, ReduceOp::kAvg).wait();
  return t.item<double>();
}

/// The same run sharded, on one rank of `mesh`.
inline Run sharded_run(const DeviceMesh& mesh, const Placements& placements, int64_t layers, int64_t steps,
                       int64_t micro, bool set_to_none = true, ShardLayout layout = ShardLayout::kPadded,
                       RuntimePolicy policy = {}, SchedulePolicy schedule = {}, const MakeOptimizer& make = sgd) {
  FsdpContext ctx(mesh.device(), policy);
  auto model = make_mlp(layers);
  shard_mlp(*model, ctx, mesh, placements, {}, 1.0, schedule, layout);
  auto optimizer = make(fsdp::parameters(*model));
  Run run;
  for (int64_t s = 0; s < steps; ++s) {
    optimizer->zero_grad(set_to_none);
    double total = 0;
    for (int64_t m = 0; m < micro; ++m) {
      auto scope = microbatch(ctx, m == micro - 1);
      auto loss =
          mlp_loss(*model, input_of(s, m, mesh.rank()), target_of(s, m, mesh.rank())) / static_cast<double>(micro);
      loss.backward();
      total += loss.item<double>();
    }
    if (policy.caller_managed_grad_sync) ctx.finish_grad_sync();
    optimizer->step();
    run.losses.push_back(mean_over_ranks(mesh, total));
  }
  run.weights = gathered(*model);
  return run;
}

/// The largest difference of losses and weights.
inline double difference(const Run& a, const Run& b) {
  double worst = 0;
  if (a.losses.size() != b.losses.size() || a.weights.size() != b.weights.size()) return INFINITY;
  for (size_t i = 0; i < a.losses.size(); ++i) worst = std::max(worst, std::abs(a.losses[i] - b.losses[i]));
  for (size_t i = 0; i < a.weights.size(); ++i) {
    if (a.weights[i].sizes() != b.weights[i].sizes()) return INFINITY;
    if (a.weights[i].numel() > 0)
      worst = std::max(worst,
                       (a.weights[i].to(torch::kDouble) - b.weights[i].to(torch::kDouble)).abs().max().item<double>());
  }
  return std::isnan(worst) ? INFINITY : worst;
}

inline WorldOptions short_timeout(int64_t ms = 20'000) {
  WorldOptions options;
  options.timeout = std::chrono::milliseconds(ms);
  return options;
}

}  // namespace fsdp::testing
