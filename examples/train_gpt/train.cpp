#include <chrono>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <numbers>
#include <unordered_set>

#include "data.h"
#include "model.h"
#include "report.h"
#include "run.h"

namespace {

/// GPT-2's: normal of standard deviation 0.02, smaller where a residual branch ends, biases zero.
void initialise(Gpt& model, int64_t layers) {
  torch::NoGradGuard no_grad;
  for (auto& p : model->named_parameters()) {
    if (p.value().dim() < 2) continue;  // norms and biases
    const bool ends_branch = p.key().ends_with("proj.weight") || p.key().ends_with("out.weight");
    torch::nn::init::normal_(p.value(), 0.0, ends_branch ? 0.02 / std::sqrt(2.0 * static_cast<double>(layers)) : 0.02);
  }
  for (auto& p : model->named_parameters())
    if (p.key().ends_with("bias")) p.value().zero_();
}

double learning_rate(const Options& o, int64_t step) {
  if (step < o.warmup) return o.lr * static_cast<double>(step + 1) / static_cast<double>(o.warmup);
  const double done =
      static_cast<double>(step - o.warmup) / static_cast<double>(std::max<int64_t>(1, o.steps - o.warmup));
  return o.lr * (0.1 + 0.45 * (1 + std::cos(std::numbers::pi * done)));
}

/// What stays between steps. `whole` counts full tensors, as a run without sharding would hold them.
PersistentBytes persistent(Gpt& model, torch::optim::Optimizer& optimizer, bool whole) {
  PersistentBytes bytes;
  int64_t elements = 0;
  if (whole) {
    fsdp::FullParameters full(*model);
    for (auto& p : fsdp::parameters(*model)) elements += p.numel();
    bytes.weights = bytes.gradients = elements * 4;
    bytes.optimizer = 2 * elements * 4;
    return bytes;
  }
  for (auto& module : model->modules()) {
    auto* unit = fsdp::get_fsdp_module(*module);
    if (!unit) continue;
    for (const auto* group : unit->parameter_groups()) {
      const int64_t gradients =
          group->has_main_grad() ? static_cast<int64_t>(group->main_grad().local_buffer().nbytes()) : 0;
      bytes.gradients += gradients;
      bytes.weights += group->persistent_bytes() - gradients;
    }
  }
  if (bytes.weights == 0)
    for (auto& p : fsdp::parameters(*model))
      bytes.weights += static_cast<int64_t>(p.nbytes()), bytes.gradients = bytes.weights;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& adam = static_cast<const torch::optim::AdamWParamState&>(*state);
    bytes.optimizer += static_cast<int64_t>(adam.exp_avg().nbytes() + adam.exp_avg_sq().nbytes());
  }
  return bytes;
}

/// All ranks run the forward, since the weights are gathered for it; the same generator makes them agree.
std::string generate(Gpt& model, const Options& o, const std::string& prompt) {
  torch::NoGradGuard no_grad;
  model->eval();
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(o.seed);
  std::vector<int64_t> ids(prompt.begin(), prompt.end());
  for (int64_t i = 0; i < o.sample; ++i) {
    const auto from = std::max<int64_t>(0, static_cast<int64_t>(ids.size()) - o.length);
    auto context = torch::tensor(std::vector<int64_t>(ids.begin() + from, ids.end())).unsqueeze(0);
    auto logits = model->forward(context).select(1, -1).squeeze(0).to(torch::kFloat) / 0.8;
    ids.push_back(torch::multinomial(torch::softmax(logits, 0), 1, false, generator).item<int64_t>());
  }
  model->train();
  std::string text;
  for (auto id : ids) text.push_back(id == '\n' || id == '\t' || (id >= 32 && id < 127) ? static_cast<char>(id) : '?');
  return text;
}

}  // namespace

void run_training(const Options& o, const std::shared_ptr<fsdp::World>& world) {
  const bool speaks = world->rank() == 0;
  auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"dp"});
  const auto bytes = load_bytes(o.data.empty() ? FSDP_DEFAULT_DATA : o.data, o.length + 2);

  torch::manual_seed(o.seed);  // every rank builds the same model
  Gpt model(o.vocab, o.length, o.dim, o.heads, o.layers);
  initialise(model, o.layers);
  fsdp::FsdpContext context(world->device());
  const bool sharded = o.strategy != "none";
  if (sharded) shard(model, context, mesh, o.strategy, o.dtype == "bfloat16" ? torch::kBFloat16 : torch::kFloat);
  torch::optim::AdamW optimizer(fsdp::parameters(*model),
                                torch::optim::AdamWOptions(o.lr).betas({0.9, 0.95}).weight_decay(0.1));
  int64_t first = 0;
  if (!o.resume.empty()) {
    const auto report = fsdp::load_checkpoint(o.resume, *model, optimizer);
    first = std::stoll(report.notes.at("step"));
    if (first >= o.steps) throw std::invalid_argument("--resume: the checkpoint is of step " + std::to_string(first));
  }
  // ... and reads its own part of the data, which depends on the step only, so that a resumed run sees the same.
  auto generator = torch::make_generator<at::CPUGeneratorImpl>();
  auto save = [&](int64_t step) {
    const auto dir = std::filesystem::path(o.save) / ("step-" + std::to_string(step));
    fsdp::save_checkpoint(dir, *model, optimizer, {.notes = {{"step", std::to_string(step)}}});
  };

  if (speaks)
    std::cout << "train_gpt: " << o.layers << " layers of width " << o.dim << ", " << world->size()
              << " ranks, strategy " << o.strategy << ", " << bytes.numel() << " bytes of text" << std::endl;
  Progress progress(o.steps);
  std::vector<StepRecord> records;
  for (int64_t step = first; step < o.steps; ++step) {
    generator.set_current_seed((o.seed * 1'000'003 + static_cast<uint64_t>(step)) * 65536 +
                               static_cast<uint64_t>(world->rank()));
    const auto start = std::chrono::steady_clock::now();
    for (auto& group : optimizer.param_groups()) group.options().set_lr(learning_rate(o, step));
    optimizer.zero_grad();
    double total = 0;
    for (int64_t m = 0; m < o.micro; ++m) {
      std::optional<fsdp::MicrobatchScope> scope;
      if (sharded) scope.emplace(context, m == o.micro - 1);
      auto ids = sample_batch(bytes, o.batch, o.length, generator);
      auto loss =
          cross_entropy(model->forward(ids.slice(1, 0, o.length)), ids.slice(1, 1)) / static_cast<double>(o.micro);
      loss.backward();
      total += loss.item<double>();
    }
    if (o.clip > 0) fsdp::clip_grad_norm_(fsdp::parameters(*model), o.clip);
    optimizer.step();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const auto tokens = static_cast<double>(o.batch * o.length * o.micro * world->size());
    records.push_back({step, mean_over_ranks(mesh, total), tokens / seconds, resident_bytes()});
    if (speaks) progress.update(records.back());
    if (o.save_every > 0 && (step + 1) % o.save_every == 0 && step + 1 < o.steps) save(step + 1);
  }
  if (speaks) progress.finish();
  if (!o.save.empty()) save(o.steps);

  const auto mine = persistent(model, optimizer, false), whole = persistent(model, optimizer, true);
  const auto sample = o.sample > 0 ? generate(model, o, "#include <") : "";
  if (!speaks) return;
  std::filesystem::create_directories(o.out);
  write_jsonl(std::filesystem::path(o.out) / "loss.jsonl", records);
  write_svg(std::filesystem::path(o.out) / "loss.svg", records);
  std::cout << "loss " << records.front().loss << " at the start, " << records.back().loss << " at the end; " << o.out
            << "/loss.jsonl and loss.svg written\n\n"
            << persistent_table(mine, whole, world->size()) << "\nsample:\n"
            << sample << std::endl;
}
