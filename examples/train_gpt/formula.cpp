/// The run of benchmarks/peers/gpt_fsdp2.py, formula by formula.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>

#include "model.h"
#include "run.h"

namespace {

void fill(torch::nn::Module& model) {
  torch::NoGradGuard no_grad;
  int64_t k = 0;
  for (auto& p : model.named_parameters()) {
    auto i = torch::arange(p.value().numel(), torch::kDouble);
    auto values = torch::sin(i * 0.37 + 1.3 * static_cast<double>(k++)) * 0.02;
    const auto& name = p.key();
    const bool norm_weight =
        name.ends_with("ln1.weight") || name.ends_with("ln2.weight") || name.ends_with("ln_f.weight");
    if (norm_weight) values += 1;
    p.value().copy_(values.to(torch::kFloat).view(p.value().sizes()));
  }
}

torch::Tensor tokens(const Options& o, int64_t step, int64_t rank, int64_t micro) {
  auto t = torch::arange(o.length + 1);
  auto b = torch::arange(o.batch).unsqueeze(1);
  return (131 * step + 71 * rank + 53 * micro + 37 * b + 11 * t + (t * t) % 7) % o.vocab;
}

}  // namespace

double mean_over_ranks(const fsdp::DeviceMesh& mesh, double value) {
  auto t = torch::tensor({value}, torch::kDouble);
  mesh.communicator_all(fsdp::Channel::kControl).all_reduce(t, fsdp::ReduceOp::kAvg).wait();
  return t.item<double>();
}

void run_formula(const Options& o, const std::shared_ptr<fsdp::World>& world) {
  auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"dp"});
  fsdp::FsdpContext context(world->device());
  Gpt model(o.vocab, o.length, o.dim, o.heads, o.layers);
  fill(*model);
  const bool sharded = o.strategy != "none";
  const auto compute = o.dtype == "bfloat16" ? torch::kBFloat16 : torch::kFloat;
  if (sharded) shard(model, context, mesh, o.strategy, compute);
  torch::optim::AdamW optimizer(fsdp::parameters(*model), torch::optim::AdamWOptions(1e-3).weight_decay(0.01));

  std::vector<double> losses, times;
  for (int64_t s = 0; s < o.warmup + o.steps; ++s) {
    const auto start = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    double total = 0;
    for (int64_t m = 0; m < o.micro; ++m) {
      std::optional<fsdp::MicrobatchScope> scope;
      if (sharded) scope.emplace(context, m == o.micro - 1);
      auto ids = tokens(o, s, world->rank(), m);
      auto logits = model->forward(ids.slice(1, 0, o.length));
      auto loss = cross_entropy(logits, ids.slice(1, 1)) / static_cast<double>(o.micro);
      loss.backward();
      total += loss.item<float>();
    }
    if (o.clip > 0) fsdp::clip_grad_norm_(fsdp::parameters(*model), o.clip);
    optimizer.step();
    if (s >= o.warmup)
      times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    losses.push_back(mean_over_ranks(mesh, total));
  }
  if (world->rank() != 0) return;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::sort(times.begin(), times.end());
  const auto n = times.size();
  const double median = n % 2 ? times[n / 2] : (times[n / 2 - 1] + times[n / 2]) / 2;
  std::printf(
      "{\"mode\": \"%s\", \"world\": %ld, \"dim\": %ld, \"layers\": %ld, \"dtype\": \"%s\", \"ms_median\": %.3f, "
      "\"ms_min\": %.3f, \"peak_rss_mib\": %.1f, \"losses\": [",
      o.strategy.c_str(), world->size(), o.dim, o.layers, o.dtype.c_str(), median, times.front(),
      static_cast<double>(usage.ru_maxrss) / 1024);
  for (size_t i = 0; i < losses.size(); ++i) std::printf("%s%.7f", i ? ", " : "", losses[i]);
  std::printf("]}\n");
}
