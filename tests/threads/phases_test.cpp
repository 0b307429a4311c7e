/// What a unit shows and allows in each phase, and when its compute weights and gradients are fresh.
#include <map>
#include <thread>

#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Phase = FsdpModule::Phase;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct WatchedImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  std::function<void(const char*)> watch = [](const char*) {};
  WatchedImpl() { linear = register_module("linear", torch::nn::Linear(4, 6)); }
  torch::Tensor forward(torch::Tensor x) {
    watch("forward");
    auto y = linear(x);
    if (y.requires_grad()) y.register_hook([this](const torch::Tensor&) { watch("backward"); });
    return y * 1.0;
  }
};
FSDP_MODULE(Watched);

TEST(Phases, HandlesShowFullWeightsInComputeAndShardsAtRest) {  // FSH-03, FSH-17 to FSH-19, MEM-05
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      Watched m;
      fill_by_formula(*m);
      auto weight = m->linear->weight;  // a handle the user kept
      const auto* impl = weight.unsafeGetTensorImpl();
      const auto full = weight.detach().clone();
      shard_one(*m, ctx, mesh, s.placements);
      auto* unit = get_fsdp_module(*m);
      const auto rows = unit->parameter_groups()[0]->main_weight().local_rows(0);
      auto expect_rest = [&](const char* when) {
        EXPECT_EQ(unit->phase(), Phase::kResting) << when;
        EXPECT_EQ(m->linear->weight.unsafeGetTensorImpl(), impl) << when;
        EXPECT_TRUE(weight.is_leaf() && weight.requires_grad()) << when;
        EXPECT_EQ(weight.size(0), rows.end - rows.begin) << when;
        EXPECT_EQ(gathered_bytes(*m), 0) << when;
      };
      expect_rest("after fully_shard");
      std::vector<std::string> seen;
      m->watch = [&](const char* where) {
        seen.push_back(std::string(where) + " " + to_string(unit->phase()));
        EXPECT_EQ(weight.unsafeGetTensorImpl(), impl);
        EXPECT_EQ(weight.sizes(), full.sizes()) << where;
        EXPECT_TRUE(torch::equal(torch::Tensor(weight.variable_data()), full)) << where;
        EXPECT_FALSE(weight.grad().defined()) << where;
      };
      auto y = m(torch::ones({1, 4}));
      expect_rest("after forward");
      y.sum().backward();
      expect_rest("after backward");
      EXPECT_THAT(seen, ElementsAre("forward forward", "backward backward"));
      EXPECT_EQ(weight.grad().sizes(), weight.sizes());
      CollectiveLog log(mesh.world());
      torch::NoGradGuard no_grad;
      m->eval();
      m->watch = [&](const char*) { EXPECT_EQ(weight.sizes(), full.sizes()); };
      m(torch::ones({1, 4}));
      expect_rest("after a forward without gradients");
      for (const auto& r : log.records()) EXPECT_EQ(r.operation, "all_gather");
    }
  });
}

TEST(Phases, OnlyForwardAndBackwardFromRest) {  // FSH-17
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Watched m;
    fill_by_formula(*m);
    {
      auto scope = fully_shard_context(ctx);
      fully_shard(m, mesh, zero3("dp"), {}, 1.0, {.hooks = ExecutionHooks::kManual});
    }
    auto* unit = get_fsdp_module(*m);
    EXPECT_THAT(thrown<StateError>([&] { unit->post_forward(); }), HasSubstr("post_forward"));
    EXPECT_THAT(thrown<StateError>([&] { unit->post_backward(); }), HasSubstr("backward"));
    unit->pre_forward();
    EXPECT_EQ(unit->phase(), Phase::kForward);
    EXPECT_THAT(thrown<StateError>([&] { unit->pre_forward(); }), HasSubstr("resting"));
    EXPECT_THAT(thrown<StateError>([&] { unit->pre_backward(); }), HasSubstr("forward"));
    auto y = m->linear(torch::ones({1, 4}));
    unit->post_forward();
    unit->pre_backward();
    EXPECT_EQ(unit->phase(), Phase::kBackward);
    EXPECT_THAT(thrown<StateError>([&] { unit->pre_backward(); }), HasSubstr("pre_backward"));
    y.sum().backward();
    EXPECT_EQ(unit->phase(), Phase::kBackward);
    unit->post_backward();
    expect_at_rest(*m);
    EXPECT_TRUE(m->linear->weight.grad().defined());
  });
}

/// A weight times its input, whose backward reads a view of the weight that forward saved.
struct SavesView : torch::autograd::Function<SavesView> {
  static torch::Tensor forward(AutogradContext* ctx, torch::Tensor x, torch::Tensor weight) {
    ctx->save_for_backward({x, weight.view({2, -1})});
    return x * weight;
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    auto saved = ctx->get_saved_variables();
    return {gradients[0] * saved[1].view({-1}), gradients[0] * saved[0]};
  }
};
struct SavesViewImpl : torch::nn::Module {
  torch::Tensor weight;
  SavesViewImpl() { weight = register_parameter("weight", torch::arange(8, torch::kFloat)); }
  torch::Tensor forward(torch::Tensor x) { return SavesView::apply(x, weight); }
};

TEST(Phases, SavedViewsOutliveTheRelease) {  // FSH-51
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    auto m = std::make_shared<Hooked<SavesViewImpl>>();
    shard_one(*m, ctx, mesh, zero3("dp"));
    auto x = torch::ones({8}, torch::requires_grad());
    auto y = m->forward(x);
    EXPECT_EQ(gathered_bytes(*m), 0);
    y.sum().backward();
    EXPECT_EQ(gathered_bytes(*m), 0);
    EXPECT_TRUE(torch::equal(x.grad(), torch::arange(8, torch::kFloat)));
    EXPECT_EQ(off_by(m->weight.grad(), 1), 0);
  });
}

TEST(Phases, PrecisionPolicies) {  // FSH-20 to FSH-23, FSH-48, OPT-01
  on_mesh({2}, [](const DeviceMesh& mesh) {
    struct Case {
      at::ScalarType own;
      MixedPrecisionPolicy policy;
      at::ScalarType main, model, gradient;
    };
    const auto bf16 = at::kBFloat16, fp32 = at::kFloat;
    const std::vector<Case> cases{
        {bf16, {}, fp32, bf16, bf16},
        {bf16, {.main_params_dtype = std::nullopt}, bf16, bf16, bf16},
        {bf16, {.main_grads_dtype = fp32}, fp32, bf16, fp32},
        {fp32, {.param_dtype = bf16}, fp32, bf16, fp32},
        {fp32, {.main_grads_dtype = bf16, .param_dtype = bf16}, fp32, bf16, bf16},
        {at::kDouble, {}, at::kDouble, at::kDouble, at::kDouble},
    };
    for (const auto& s : one_axis())
      for (const auto& c : cases) {
        FsdpContext ctx(mesh.device());
        Probe probe(4, 3, c.own);
        shard_one(*probe, ctx, mesh, s.placements, c.policy);
        const auto* group = get_fsdp_module(*probe)->parameter_groups()[0];
        EXPECT_EQ(group->main_weight().dtype(), c.main);
        EXPECT_EQ(group->model_weight().dtype(), c.model);
        EXPECT_EQ(group->main_grad().dtype(), c.gradient);
        EXPECT_EQ(probe->weight.scalar_type(), c.main);
        EXPECT_EQ(group->main_weight().local_buffer().is_alias_of(group->model_weight().local_buffer()),
                  c.main == c.model);
        const auto first = probe->forward(1.0);
        first.backward();
        EXPECT_EQ(probe->weight.grad().scalar_type(), c.gradient);
        FullyShardOptimizer<torch::optim::SGD> sgd(fsdp::parameters(*probe), 0.25);
        auto kept = probe->weight.grad();
        sgd.step();
        EXPECT_TRUE(probe->weight.grad().is_same(kept)) << "the optimizer's cast was left in place";  // OPT-03
        EXPECT_EQ(probe->forward(1.0).item<double>(), 9) << s.name;
      }
    // The wire's dtype is the policy's: 1 + 2^-9 survives fp32 and not bf16.
    for (bool wide : {true, false}) {
      FsdpContext ctx(mesh.device());
      Probe probe(4, 3, bf16);
      shard_one(*probe, ctx, mesh, zero2("dp"),
                {.main_grads_dtype = fp32, .grad_comm_dtype = wide ? std::optional(fp32) : std::nullopt});
      probe->forward(mesh.rank() == 0 ? 1.0 : std::exp2(-9)).backward();
      EXPECT_EQ(off_by(probe->weight.grad(), wide ? (1 + std::exp2(-9)) / 2 : 0.5), 0);
    }
  });
}

TEST(Phases, LoadingIntoShardsRefreshesComputeWeights) {  // FSH-16, OPT-04
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      Probe probe(4, 3);
      shard_one(*probe, ctx, mesh, s.placements, {.param_dtype = at::kBFloat16});
      EXPECT_EQ(probe->forward(1.0).item<double>(), 12);
      {
        torch::NoGradGuard no_grad;
        probe->weight.copy_(torch::full_like(probe->weight, 2.0));
      }
      EXPECT_EQ(probe->forward(1.0).item<double>(), 24) << s.name;
      // Once per step, not per microbatch: where the weights stay whole they are gathered after a step only.
      if (s.name != "zero1" && s.name != "zero2") continue;
      torch::optim::SGD sgd(fsdp::parameters(*probe), 0.5);
      for (int step = 0; step < 3; ++step) {
        CollectiveLog log(mesh.world());
        sgd.zero_grad();
        for (int k = 0; k < 3; ++k) {
          auto scope = microbatch(ctx, k == 2);
          probe->forward(1.0).backward();
        }
        sgd.step();
        int gathers = 0;
        for (const auto& r : log.records()) gathers += r.operation == "all_gather";
        EXPECT_EQ(gathers, step == 0 ? 0 : 1) << s.name;
      }
    }
  });
}

TEST(Phases, GradientsKeepTheirMemory) {  // FSH-42, FSH-43, FSH-45, FSH-47, MIC-04, MIC-07
  for (int64_t ranks : {1, 2, 4})
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      FsdpContext ctx(mesh.device());
      Probe one(ranks, 1), two(ranks, 1);
      {
        auto scope = fully_shard_context(ctx);
        fully_shard(one, mesh, zero3("dp"));
        fully_shard(two, mesh, zero3("dp"));
      }
      const double mean = (static_cast<double>(ranks) + 1) / 2;
      const auto& main = get_fsdp_module(*one)->parameter_groups()[0]->main_grad();
      auto run = [&](bool last_in_forward, bool last_in_backward) {
        auto scope = std::make_unique<MicrobatchScope>(ctx, last_in_forward);
        auto loss = one->forward(static_cast<double>(mesh.rank() + 1)) + two->forward(1.0);
        scope.reset();
        auto other = microbatch(ctx, last_in_backward);
        loss.backward();
      };
      run(true, false);
      run(true, false);
      EXPECT_EQ(off_by(one->weight.grad(), 2 * mean), 0) << "sharded gradients are readable early";
      EXPECT_EQ(one->weight.grad().data_ptr(), main.local_buffer().data_ptr());
      EXPECT_EQ(off_by(two->weight.grad(), 2), 0);
      const auto kept = one->weight.grad();
      one->zero_grad(/*set_to_none=*/false);
      EXPECT_EQ(off_by(main.local_buffer(), 0), 0) << "zeroed in place";
      run(false, true);
      EXPECT_EQ(off_by(one->weight.grad(), mean), 0);
      EXPECT_EQ(one->weight.grad().data_ptr(), kept.data_ptr());
      one->zero_grad();
      EXPECT_FALSE(one->weight.grad().defined());
      run(true, true);
      EXPECT_EQ(off_by(one->weight.grad(), mean), 0) << "overwritten after clearing";
    });
}

struct TwoWeightsImpl : torch::nn::Module {
  torch::Tensor a, b;
  TwoWeightsImpl() {
    a = register_parameter("a", torch::ones({4, 2}));
    b = register_parameter("b", torch::ones({4, 2}));
  }
  torch::Tensor forward(double c) { return (a * c).sum() + (b * c).sum(); }
};
FSDP_MODULE(TwoWeights);

TEST(Phases, GradientsClearedForSomeParametersOnly) {  // FSH-46, with each parameter counted by itself
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      TwoWeights m;
      shard_one(*m, ctx, mesh, s.placements);
      m(1.0).backward();
      m->a.mutable_grad() = torch::Tensor();
      m(2.0).backward();
      EXPECT_EQ(off_by(m->a.grad(), 2), 0) << s.name;
      EXPECT_EQ(off_by(m->b.grad(), 3), 0) << s.name;
      m->b.mutable_grad() = torch::full(m->b.sizes(), 10.0);
      m(1.0).backward();
      EXPECT_EQ(off_by(m->a.grad(), 3), 0) << s.name;
      EXPECT_EQ(off_by(m->b.grad(), 11), 0) << s.name << ": a gradient the user put there counts";
    }
  });
}

TEST(Phases, GradientsOfHybridStrategiesBetweenMicrobatches) {  // HSD-06, HSD-11, MIC-06
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (const auto& s : two_axes()) {
      FsdpContext ctx(mesh.device());
      Probe probe(8, 2);
      shard_one(*probe, ctx, mesh, s.placements);
      for (int k = 0; k < 3; ++k) {
        auto scope = microbatch(ctx, k == 2);
        probe->forward(static_cast<double>(mesh.rank() + 1)).backward();
        if (k < 2) {
          EXPECT_THAT(thrown<StateError>([&] { (void)(probe->weight.grad() + 0); }), HasSubstr("not reduced"))
              << s.name;
        }
      }
      EXPECT_EQ(off_by(probe->weight.grad(), 3 * 2.5), 0) << s.name;
    }
  });
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 1}, {1, 2}})
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const auto& s : two_axes()) {
        FsdpContext ctx(mesh.device());
        Probe probe(8, 2);
        shard_one(*probe, ctx, mesh, s.placements);
        CollectiveLog log(mesh.world());
        probe->forward(static_cast<double>(mesh.rank() + 1)).backward();
        EXPECT_EQ(off_by(probe->weight.grad(), 1.5), 0) << s.name;
        for (const auto& r : log.records()) EXPECT_EQ(r.axes, shape[0] == 2 ? "outer" : "inner") << s.name;
      }
    });
}

struct MapOutImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  MapOutImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
  std::map<std::string, torch::Tensor> forward(torch::Tensor x) { return {{"y", linear(x)}, {"x", x}}; }
};
FSDP_MODULE(MapOut);

TEST(Phases, ParameterlessParentsAndMapOutputs) {  // FSH-02, FSH-57
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    fill_by_formula(*model);
    MapOut map;
    fill_by_formula(*map);
    {
      auto scope = fully_shard_context(ctx);
      for (auto& child : model->children()) fully_shard(*child, mesh, zero3("dp"));
      EXPECT_TRUE(fully_shard(model, mesh, zero3("dp")).parameter_groups().empty());
      fully_shard(map, mesh, zero3("dp"));
    }
    torch::optim::SGD sgd(fsdp::parameters(*model), 0.1);
    const auto before = gathered(*model);
    model->forward(torch::ones({3, 4})).sum().backward();
    sgd.step();
    const auto after = gathered(*model);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_FALSE(torch::equal(before[i], after[i]));
    map(torch::ones({1, 4}))["y"].sum().backward();
    expect_at_rest(*map);
    EXPECT_TRUE(map->linear->bias.grad().defined());
  });
}

// faults B36: a rank that is late in backward finds its gradients unharmed, whatever its neighbours' buffers do.
TEST(Phases, B36_LateRanksKeepTheirGradients) {
  on_mesh(
      {2, 2},
      [](const DeviceMesh& mesh) {
        std::map<std::string, std::vector<torch::Tensor>> undisturbed;
        for (int delay : {0, 1, 7, 20})
          for (auto budget : {std::optional<int64_t>(0), std::optional<int64_t>(), std::optional<int64_t>(400)})
            for (const auto& s : two_axes()) {
              FsdpContext ctx(mesh.device());
              auto model = make_mlp(6);
              {
                torch::NoGradGuard no_grad;  // integers: sums are exact in fp32
                for (auto& p : model->parameters()) p.copy_((p * 10).round());
              }
              shard_mlp(*model, ctx, mesh, s.placements, {}, 1.0,
                        {.forward_prefetch_size = budget, .backward_prefetch_size = budget});
              auto x = (input_of(0, 0, mesh.rank()) * 3).round();
              torch::Tensor total;
              for (int64_t i = 0; i < 6; ++i) {  // equal blocks side by side: small integers all the way
                auto y = model->blocks[i]->as<Block>()->forward(x);
                if (delay)
                  y.register_hook([delay, i, rank = mesh.rank()](const torch::Tensor&) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(delay * (rank + i) % 23));
                  });
                total = total.defined() ? total + y : y;
              }
              model->forward(total.detach()).sum().backward();
              total.sum().backward();
              std::vector<torch::Tensor> gradients;
              for (auto& p : fsdp::parameters(*model)) gradients.push_back(p.grad().clone());
              auto [first, fresh] = undisturbed.emplace(s.name, gradients);
              if (fresh) continue;
              for (size_t i = 0; i < gradients.size(); ++i)
                EXPECT_TRUE(torch::equal(gradients[i], first->second[i])) << s.name << " delay " << delay;
            }
      },
      60'000);
}

}  // namespace
}  // namespace fsdp::testing
