/// Activation checkpoints: fsdp::checkpoint, and segments that users run again in backward by their own means.
#include "support/ranks.h"

#include <map>

#include <ATen/autocast_mode.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum class How { kPlain, kAroundUnit, kInsideUnit, kAroundTwo, kNested, kUserFunction };

/// A user's own reentrant checkpoint of one module.
struct RunAgain : torch::autograd::Function<RunAgain> {
  static torch::Tensor forward(AutogradContext* ctx, torch::Tensor x, Block* block) {
    ctx->save_for_backward({x});
    ctx->saved_data["block"] = reinterpret_cast<int64_t>(block);
    return (*block)->forward(x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    auto* block = reinterpret_cast<Block*>(ctx->saved_data["block"].toInt());
    auto x = ctx->get_saved_variables()[0].detach().requires_grad_();
    torch::AutoGradMode grad(true);
    auto y = (*block)->forward(x);
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), torch::Tensor()};
  }
};

struct InnerImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  bool recompute;
  explicit InnerImpl(bool r) : recompute(r) {
    up = register_module("up", torch::nn::Linear(6, 10));
    down = register_module("down", torch::nn::Linear(10, 6));
  }
  torch::Tensor forward(torch::Tensor x) {
    auto run = [this](torch::Tensor x) { return down(torch::tanh(up(x))); };
    return recompute ? checkpoint(run, x) : run(x);
  }
};
FSDP_MODULE(Inner);

struct NetImpl : torch::nn::Module {
  std::vector<Block> blocks;
  Inner inner{nullptr};
  torch::nn::Linear head{nullptr};
  How how;
  explicit NetImpl(How h) : how(h) {
    for (int64_t i = 0; i < 2; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(6, 10)));
    inner = register_module("inner", Inner(h == How::kInsideUnit || h == How::kNested));
    head = register_module("head", torch::nn::Linear(6, 3));
  }
  torch::Tensor forward(torch::Tensor x) {
    auto one = [this](size_t i) { return [this, i](torch::Tensor x) { return x + blocks[i](x); }; };
    auto all = [&](torch::Tensor x) { return inner(one(1)(one(0)(x))); };
    switch (how) {
      case How::kPlain:
      case How::kInsideUnit:
        return head(all(x));
      case How::kAroundUnit:
        return head(inner(checkpoint(one(1), checkpoint(one(0), x))));
      case How::kAroundTwo:
      case How::kNested:
        return head(checkpoint([this, one](torch::Tensor x) { return inner(one(1)(one(0)(x))); }, x));
      case How::kUserFunction:
        x = x.detach().requires_grad_();  // or autograd would not come by the function
        for (auto& b : blocks) x = x + RunAgain::apply(x, &b);
        return head(inner(x));
    }
    return x;
  }
};
FSDP_MODULE(Net);

Run run_reference(int64_t ranks) {
  Net net(How::kPlain);
  fill_by_formula(*net);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  fsdp::testing::Run run;
  for (int64_t s = 0; s < 6; ++s) {
    sgd.zero_grad();
    double total = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      auto loss = torch::mse_loss(net(input_of(s, 0, r)), target_of(s, 0, r)) / static_cast<double>(ranks);
      loss.backward();
      total += loss.item<double>();
    }
    sgd.step();
    run.losses.push_back(total);
  }
  for (auto& p : net->parameters()) run.weights.push_back(p.detach().clone());
  return run;
}

// faults B14, behaviours REC-01, REC-02, REC-04. Operator hooks see the same as module hooks.
TEST(Recompute, B14_TrainsTheSameAndGathersOnceMore) {
  for (int64_t ranks : {1, 2, 3}) {
    const auto reference = run_reference(ranks);
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (auto hooks : {ExecutionHooks::kAuto, ExecutionHooks::kOperator})
        for (auto how : {How::kAroundUnit, How::kInsideUnit, How::kAroundTwo, How::kNested, How::kUserFunction})
          for (const auto& s : one_axis()) {
            // A user's function runs without grad mode, which operator hooks take for an optimizer's reading.
            if (how == How::kUserFunction && hooks == ExecutionHooks::kOperator) continue;
            const auto what = s.name + " way " + std::to_string(static_cast<int>(how)) + " hooks " +
                              std::to_string(static_cast<int>(hooks));
            FsdpContext ctx(mesh.device());
            Net net(how);
            fill_by_formula(*net);
            {
              auto scope = fully_shard_context(ctx);
              const SchedulePolicy schedule{.hooks = hooks};
              for (auto& b : net->blocks) fully_shard(b, mesh, s.placements, {}, 1.0, schedule);
              fully_shard(net->inner, mesh, s.placements, {}, 1.0, schedule);
              fully_shard(net, mesh, s.placements, {}, 1.0, schedule);
            }
            torch::optim::SGD sgd(fsdp::parameters(*net), torch::optim::SGDOptions(0.1).momentum(0.9));
            fsdp::testing::Run run;
            for (int64_t step = 0; step < 6; ++step) {
              CollectiveLog log(mesh.world());
              sgd.zero_grad();
              auto loss = torch::mse_loss(net(input_of(step, 0, mesh.rank())), target_of(step, 0, mesh.rank()));
              loss.backward();
              expect_at_rest(*net);
              sgd.step();
              run.losses.push_back(mean_over_ranks(mesh, loss.item<double>()));
              if (s.name != "zero3" || ranks == 1) continue;
              std::map<std::string, int> gathers, reductions;
              for (const auto& r : log.records()) ++(r.operation == "all_gather" ? gathers : reductions)[r.unit];
              for (const auto* unit : {"block0", "block1", "inner", ""}) {
                // Operator hooks keep the unit whose forward was the last until backward, which comes at once.
                const bool kept = hooks == ExecutionHooks::kOperator && !*unit;
                EXPECT_EQ(gathers[unit], kept ? 1 : 2) << what << " unit '" << unit << "'";
                EXPECT_EQ(reductions[unit], 1) << what << " unit '" << unit << "'";
              }
            }
            run.weights = gathered(*net);
            EXPECT_LT(difference(reference, run), 1e-6) << what;
          }
    });
  }
}

TEST(Recompute, OutputsOfAnyShape) {
  using Out = std::tuple<torch::Tensor, std::vector<torch::Tensor>, int64_t>;
  auto w = torch::full({2}, 3.0, torch::requires_grad());
  int runs = 0;
  auto fn = [&](torch::Tensor x, std::optional<torch::Tensor> y, int64_t k) {
    ++runs;
    return Out{x * w, {x, y ? *y * static_cast<double>(k) : x, torch::ones({1}, torch::kLong)}, k};
  };
  auto x = torch::ones({2}, torch::requires_grad());
  auto [a, list, k] = checkpoint(fn, x, std::optional<torch::Tensor>(x + 1), int64_t{5});
  EXPECT_EQ(k, 5);
  EXPECT_EQ(list.size(), 3u);
  EXPECT_FALSE(list[2].requires_grad());
  (a.sum() + 2 * list[0].sum() + list[1].sum()).backward();
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(off_by(x.grad(), 3 + 2 + 5), 0);
  EXPECT_EQ(off_by(w.grad(), 1), 0);
  {
    torch::NoGradGuard no_grad;
    EXPECT_FALSE(std::get<0>(checkpoint(fn, x, std::optional<torch::Tensor>(), int64_t{1})).requires_grad());
    EXPECT_EQ(runs, 3);
  }
}

TEST(Recompute, RandomStateAndAutocastAreThoseOfTheFirstRun) {
  torch::manual_seed(7);
  std::vector<torch::Tensor> masks;
  auto x = torch::ones({64}, torch::requires_grad());
  auto fn = [&](torch::Tensor v) {
    masks.push_back(torch::dropout(torch::ones({64}), 0.5, true));
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_EQ(torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type(), torch::kBFloat16);
    return v * masks.back();
  };
  at::autocast::set_autocast_enabled(at::kCPU, true);
  auto y = checkpoint(fn, x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  torch::manual_seed(11);
  const auto expected_after = torch::rand({1});
  torch::manual_seed(11);
  y.sum().backward();
  ASSERT_EQ(masks.size(), 2u);
  EXPECT_TRUE(torch::equal(masks[0], masks[1]));
  EXPECT_TRUE(torch::equal(torch::rand({1}), expected_after)) << "backward moved the caller's random state";
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(Recompute, Misuse) {
  auto x = torch::ones({2}, torch::requires_grad());
  auto y = checkpoint([](torch::Tensor v) { return v * v; }, x);
  EXPECT_THAT(thrown<StateError>([&] { torch::autograd::grad({y.sum()}, {x}); }), HasSubstr("backward()"));
  y.sum().backward();
  EXPECT_THAT(thrown<StateError>([&] { y.sum().backward(); }), HasSubstr("second backward"));
  int runs = 0;
  auto z = checkpoint(
      [&](torch::Tensor v) {
        if (++runs == 2) throw std::runtime_error("second run");
        return v * v;
      },
      x);
  EXPECT_THAT(thrown<std::runtime_error>([&] { z.sum().backward(); }), HasSubstr("second run"));
}

}  // namespace
}  // namespace fsdp::testing
