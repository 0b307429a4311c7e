/// Checkpoints between any numbers of ranks, meshes, placements and layouts.
#include <fstream>
#include <limits>

#include "json/json.h"
#include "support/folder.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

struct PartImpl : torch::nn::Module {
  explicit PartImpl(std::vector<std::vector<int64_t>> shapes) {
    for (size_t i = 0; i < shapes.size(); ++i)
      register_parameter(std::string("p").append(std::to_string(i)), torch::zeros(shapes[i]));
  }
  torch::Tensor forward(double x) {
    auto total = torch::zeros({});
    for (auto& p : parameters()) total = total + (p * wave(p.sizes().vec(), x).to(p.scalar_type())).sin().sum();
    return total;
  }
};
FSDP_MODULE(Part);

/// Parameters of odd shapes in two units; the loss is the same on every rank, and so is every gradient.
struct Odd : torch::nn::Module {
  Part first{std::vector<std::vector<int64_t>>{{6, 4}, {1, 5}}};
  Part second{std::vector<std::vector<int64_t>>{{5, 3}, {7}, {}, {0, 3}, {4, 2, 3}}};
  Odd() {
    register_module("first", first);
    register_module("second", second);
    fill_by_formula(*this);
  }
  torch::Tensor forward(double x) { return first(x) + second(x); }
};

void shard_odd(Odd& m, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& placements,
               ShardLayout layout = ShardLayout::kPadded, MixedPrecisionPolicy precision = {}) {
  auto scope = fully_shard_context(ctx);
  fully_shard(*m.first, mesh, placements, precision, 1.0, {}, layout);
  fully_shard(*m.second, mesh, placements, precision, 1.0, {}, layout);
}

std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<torch::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                               torch::optim::AdamWOptions(0.02).weight_decay(0.1).amsgrad(true));
}

std::vector<double> steps(Odd& model, torch::optim::Optimizer& optimizer, int64_t begin, int64_t end) {
  std::vector<double> losses;
  for (int64_t s = begin; s < end; ++s) {
    optimizer.zero_grad();
    auto loss = model.forward(1.0 + 0.3 * static_cast<double>(s));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

/// Full tensors of what the optimizer keeps for each parameter of Adam's kind.
std::vector<torch::Tensor> gathered_moments(torch::nn::Module& module, torch::optim::Optimizer& optimizer) {
  std::vector<torch::Tensor> result;
  for (const auto& m : module.modules()) {
    auto* unit = get_fsdp_module(*m);
    if (!unit) continue;
    const auto handles = m->parameters();
    for (const auto* group : unit->parameter_groups())
      for (int which = 0; which < 3; ++which) {
        const auto& main = group->main_weight();
        DBuffer rows(main.mesh(), main.placements(), main.shared_layout(), torch::kFloat);
        for (size_t i = 0; i < handles.size(); ++i) {
          const auto it = optimizer.state().find(handles[i].unsafeGetTensorImpl());
          if (it == optimizer.state().end()) continue;
          auto& state = static_cast<torch::optim::AdamWParamState&>(*it->second);
          auto target = rows.local_tensor(static_cast<int64_t>(i));
          target.copy_((which == 0   ? state.exp_avg()
                        : which == 1 ? state.exp_avg_sq()
                                     : state.max_exp_avg_sq())
                           .reshape(target.sizes()));
        }
        auto full = rows.redistribute(std::vector<Placement>(main.placements().size(), Replicate{}));
        for (size_t i = 0; i < handles.size(); ++i)
          result.push_back(full.local_tensor(static_cast<int64_t>(i)).clone());
      }
  }
  return result;
}

bool equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!torch::equal(a[i], b[i])) return false;
  return true;
}

struct Target {
  std::vector<int64_t> shape;
  Placements placements;
  ShardLayout layout = ShardLayout::kPadded;
};

// Saved from one sharding, loaded into another: bit for bit, and training goes on as if it had never stopped.
TEST(Checkpoint, B43_CHK08_AnyNumberOfRanksMeshPlacementsAndLayout) {
  const auto outer_inner_ddp =
      Placements{{"outer", "inner"}, {Replicate{}, Replicate{}}, {Partial{}, Partial{}}, {Replicate{}, Replicate{}}};
  const std::vector<Target> all{
      {{4}, zero3("dp")},
      {{4}, zero3("dp"), ShardLayout::kUnpadded},
      {{4}, with_kind(zero3("dp"), TensorAtomic{})},
      {{1}, zero3("dp")},
      {{3}, zero3("dp"), ShardLayout::kUnpadded},
      {{3}, ddp("dp")},
      {{5}, zero2("dp")},
      {{8}, zero3("dp")},
      {{2}, zero1("dp")},
      {{2, 2}, hsdp("outer", "inner")},
      {{2, 2}, hfsdp("outer", "inner")},
      {{2, 2}, hfsdp("outer", "inner"), ShardLayout::kUnpadded},
      {{2, 2}, outer_inner_ddp},
  };
  Odd reference;
  auto reference_optimizer = adamw(fsdp::parameters(reference));
  const auto expected = steps(reference, *reference_optimizer, 0, 6);

  TemporaryFolder folder;
  auto on_target = [&](const Target& t, auto&& body) {
    on_mesh(t.shape, [&](const DeviceMesh& mesh) {
      auto model = std::make_shared<Odd>();
      OwnerMap owners;
      int64_t next = 0;
      for (auto& p : model->parameters())
        owners[p.unsafeGetTensorImpl()] = next++ % std::max<int64_t>(1, mesh.size() - 1);
      const bool whole = is_sharded(t.placements.optimizer.back()) &&
                         std::holds_alternative<TensorAtomic>(t.placements.optimizer.back());
      FsdpContext ctx(mesh.device(), {}, whole ? owners : OwnerMap());
      shard_odd(*model, ctx, mesh, t.placements, t.layout);
      body(mesh, *model);
    });
  };
  for (size_t from = 0; from < all.size(); ++from) {
    const auto dir = folder / std::to_string(from);
    std::vector<torch::Tensor> weights, moments;
    on_target(all[from], [&](const DeviceMesh& mesh, Odd& model) {
      auto optimizer = adamw(fsdp::parameters(model));
      steps(model, *optimizer, 0, 3);
      save_checkpoint(dir, model, *optimizer);
      auto w = gathered(model);
      auto m = gathered_moments(model, *optimizer);
      if (mesh.rank() == 0) weights = w, moments = m;
    });
    ASSERT_EQ(weights.size(), 7u);
    for (size_t to = 0; to < all.size(); ++to) {
      SCOPED_TRACE(std::to_string(from) + " to " + std::to_string(to));
      on_target(all[to], [&](const DeviceMesh&, Odd& model) {
        {
          torch::NoGradGuard no_grad;
          for (auto& p : model.parameters()) p.fill_(std::numeric_limits<float>::quiet_NaN());
        }
        auto optimizer = adamw(fsdp::parameters(model));
        const auto report = load_checkpoint(dir, model, *optimizer);
        EXPECT_THAT(report.missing, IsEmpty());
        EXPECT_THAT(report.unexpected, IsEmpty());
        EXPECT_TRUE(equal(gathered(model), weights));
        EXPECT_TRUE(equal(gathered_moments(model, *optimizer), moments));
        const auto losses = steps(model, *optimizer, 3, 6);
        for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[3 + i], 1e-5);
      });
    }
  }
}

MixedPrecisionPolicy bf16() {
  MixedPrecisionPolicy policy;
  policy.param_dtype = torch::kBFloat16;
  return policy;
}

// The compute weights follow a load, whether they were gathered before or not.
TEST(Checkpoint, B44_ComputeWeightsFollow) {
  for (const auto& s : one_axis()) {
    TemporaryFolder folder;
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      auto make = [&](FsdpContext& ctx) {
        auto model = make_mlp(2);
        shard_mlp(*model, ctx, mesh, s.placements, bf16());
        return model;
      };
      auto loss_of = [&](Mlp::Impl& model, int64_t step) {
        return torch::mse_loss(model.forward(input_of(step, 0, mesh.rank()).to(torch::kBFloat16)).to(torch::kFloat),
                               target_of(step, 0, mesh.rank()));
      };
      auto train = [&](Mlp::Impl& model, auto& optimizer, int64_t begin, int64_t end) {
        double last = 0;
        for (int64_t step = begin; step < end; ++step) {
          optimizer.zero_grad();
          auto loss = loss_of(model, step);
          loss.backward();
          optimizer.step();
          last = loss.item<double>();
        }
        return last;
      };
      using Sgd = FullyShardOptimizer<torch::optim::SGD>;
      const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
      FsdpContext ctx(mesh.device());
      auto model = make(ctx);
      Sgd optimizer(fsdp::parameters(*model), options);
      train(*model, optimizer, 0, 3);
      save_checkpoint(folder / "c", *model, optimizer);
      torch::Tensor before;
      {
        torch::NoGradGuard no_grad;
        before = model->forward(input_of(0, 0, 0).to(torch::kBFloat16));
      }
      const double expected = train(*model, optimizer, 3, 4);
      for (const bool used_before : {false, true}) {
        FsdpContext other_ctx(mesh.device());
        auto other = make(other_ctx);
        {
          torch::NoGradGuard no_grad;
          for (auto& p : other->parameters()) p.fill_(0.25);
          if (used_before) other->forward(input_of(1, 0, 0).to(torch::kBFloat16));
        }
        Sgd other_optimizer(fsdp::parameters(*other), options);
        load_checkpoint(folder / "c", *other, other_optimizer);
        {
          torch::NoGradGuard no_grad;
          EXPECT_TRUE(torch::equal(other->forward(input_of(0, 0, 0).to(torch::kBFloat16)), before)) << s.name;
        }
        EXPECT_EQ(train(*other, other_optimizer, 3, 4), expected) << s.name;
      }
    });
  }
}

// The weights that are saved are the optimizer's, not the ones that compute uses.
TEST(Checkpoint, B45_CHK01_LowBitsSurvive) {
  TemporaryFolder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    using Sgd = FullyShardOptimizer<torch::optim::SGD>;
    using Adam = FullyShardOptimizer<torch::optim::AdamW>;
    auto run = [&](auto& model, auto& optimizer, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        optimizer.zero_grad();
        model.forward(1.0).backward();
        optimizer.step();
      }
    };
    FsdpContext a(mesh.device()), b(mesh.device());
    Probe first(4, 3), second(4, 3);
    shard_one(*first, a, mesh, zero3("dp"), bf16());
    shard_one(*second, b, mesh, zero3("dp"), bf16());
    Sgd first_optimizer(fsdp::parameters(*first), torch::optim::SGDOptions(std::ldexp(1.0, -10)));
    run(*first, first_optimizer, 3);
    save_checkpoint(folder / "sgd", *first, first_optimizer);
    Sgd second_optimizer(fsdp::parameters(*second), torch::optim::SGDOptions(1.0));
    load_checkpoint(folder / "sgd", *second, second_optimizer);
    run(*second, second_optimizer, 3);
    EXPECT_EQ(off_by(gathered(*second)[0], 0.994140625), 0.0);

    auto straight = [&](int64_t n, bool stop) {
      FsdpContext ctx(mesh.device()), other_ctx(mesh.device());
      Probe model(4, 3), other(4, 3);
      shard_one(*model, ctx, mesh, zero3("dp"), bf16());
      Adam optimizer(fsdp::parameters(*model), torch::optim::AdamWOptions(0.01));
      run(*model, optimizer, n);
      if (!stop) return gathered(*model);
      save_checkpoint(folder / "adam", *model, optimizer);
      shard_one(*other, other_ctx, mesh, zero3("dp"), bf16());
      Adam other_optimizer(fsdp::parameters(*other), torch::optim::AdamWOptions(0.5));
      load_checkpoint(folder / "adam", *other, other_optimizer);
      run(*other, other_optimizer, n);
      return gathered(*other);
    };
    EXPECT_TRUE(equal(straight(6, false), straight(3, true)));
  });
}

/// A parameter that is not used until late, one with fewer rows than ranks, and a normal one; each its own unit.
struct Uneven : torch::nn::Module {
  Probe late{6, 2}, small{2, 3}, normal{8, 3};
  Uneven() {
    register_module("late", late);
    register_module("small", small);
    register_module("normal", normal);
  }
  torch::Tensor forward(bool all) {
    auto loss = small(2.0) * normal(3.0);
    return all ? loss + late(1.0) : loss;
  }
};

// State of some parameters, or on some ranks, only.
TEST(Checkpoint, B47_StateOfSomeParametersOnly) {
  TemporaryFolder folder;
  auto train = [](Uneven& model, torch::optim::AdamW& optimizer, int64_t n, bool all = false) {
    for (int64_t i = 0; i < n; ++i) {
      optimizer.zero_grad();
      model.forward(all).backward();
      optimizer.step();
    }
  };
  auto make = [](FsdpContext& ctx, const DeviceMesh& mesh) {
    auto model = std::make_shared<Uneven>();
    auto scope = fully_shard_context(ctx);
    for (auto* part : {&model->late, &model->small, &model->normal}) fully_shard(*part, mesh, zero3("dp"));
    return model;
  };
  std::vector<torch::Tensor> uninterrupted;
  on_mesh({4}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    auto model = make(ctx, mesh);
    torch::optim::AdamW optimizer(fsdp::parameters(*model), torch::optim::AdamWOptions(0.125).weight_decay(0.0));
    save_checkpoint(folder / "before", *model, optimizer);
    EXPECT_TRUE(optimizer.state().empty());
    train(*model, optimizer, 1);
    EXPECT_EQ(optimizer.state().size(), 2u);
    save_checkpoint(folder / "after", *model, optimizer);
    EXPECT_EQ(optimizer.state().size(), 2u);  // saving has no side effect
    train(*model, optimizer, 2, true);
    const auto weights = gathered(*model);
    if (mesh.rank() == 0) uninterrupted = weights;
  });
  for (const int64_t ranks : {4, 2})
    for (const bool ours : {false, true})
      on_mesh({ranks}, [&](const DeviceMesh& mesh) {
        FsdpContext ctx(mesh.device());
        auto model = make(ctx, mesh);
        std::unique_ptr<torch::optim::AdamW> optimizer;
        const auto options = torch::optim::AdamWOptions(0.125).weight_decay(0.0);
        if (ours)
          optimizer = std::make_unique<fsdp::optim::AdamW>(fsdp::parameters(*model), options);
        else
          optimizer = std::make_unique<torch::optim::AdamW>(fsdp::parameters(*model), options);
        train(*model, *optimizer, 2, true);  // state that the load must take away
        load_checkpoint(folder / "after", *model, *optimizer);
        EXPECT_EQ(optimizer->state().size(), 2u);
        train(*model, *optimizer, 1, true);
        // The first true update of Adam is of the size lr.
        EXPECT_LT(off_by(gathered(*model)[0], 1 - 0.125), 1e-6);
        train(*model, *optimizer, 1, true);
        const auto weights = gathered(*model);
        for (size_t i = 0; i < weights.size(); ++i)
          EXPECT_TRUE(ours ? torch::allclose(weights[i], uninterrupted[i], 1e-6, 1e-6)
                           : torch::equal(weights[i], uninterrupted[i]))
              << i;
        load_checkpoint(folder / "before", *model, *optimizer);
        EXPECT_TRUE(optimizer->state().empty());
        EXPECT_EQ(off_by(gathered(*model)[2], 1.0), 0.0);
      });
}

struct WeightsImpl : torch::nn::Module {
  explicit WeightsImpl(const std::vector<std::pair<std::string, torch::Tensor>>& weights) {
    for (const auto& [name, value] : weights) register_parameter(name, value);
  }
  torch::Tensor forward() {
    auto total = torch::zeros({}, torch::kDouble);
    for (auto& p : parameters()) total = total + p.to(torch::kDouble).pow(2).sum();
    return total;
  }
};
FSDP_MODULE(Weights);

// A load checks everything first, says all that is wrong in one message, and changes nothing when it fails.
TEST(Checkpoint, B49_WhatDoesNotFitIsRefused) {
  using Named = std::vector<std::pair<std::string, torch::Tensor>>;
  TemporaryFolder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    auto make = [&](FsdpContext& ctx, const Named& weights) {
      auto model = std::make_shared<Weights::Impl>(weights);
      shard_one(*model, ctx, mesh, zero3("dp"));
      return model;
    };
    auto step = [](Weights::Impl& model, torch::optim::SGD& o) {
      model.forward().backward();
      o.step();
      o.zero_grad();
    };
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    {
      FsdpContext ctx(mesh.device());
      auto model = make(ctx, {{"a", wave({6, 4}, 1)}, {"b", wave({3}, 2)}});
      torch::optim::SGD optimizer(fsdp::parameters(*model), options);
      step(*model, optimizer);
      save_checkpoint(folder / "c", *model, optimizer);
    }
    struct Case {
      Named weights;
      std::vector<std::string> says;
    };
    for (const auto& c : std::vector<Case>{
             {{{"a", wave({8, 4}, 1)}, {"b", wave({3}, 2)}}, {"'a': saved [6, 4] Float, expected [8, 4] Float"}},
             {{{"a", wave({4, 6}, 1)}, {"b", wave({3}, 2)}}, {"'a': saved [6, 4] Float, expected [4, 6] Float"}},
             {{{"a", wave({24}, 1)}, {"b", wave({3}, 2)}}, {"'a': saved [6, 4] Float, expected [24] Float"}},
             {{{"a", wave({6, 4}, 1)}, {"b", wave({3}, 2)}, {"extra", wave({2}, 2)}},
              {"'extra': missing in it", "'optimizer/extra': missing in it"}},
             {{{"a", wave({6, 4}, 1)}}, {"'b': in it, but not here", "'optimizer/b': in it, but not here"}},
             {{{"a", wave({6, 4}, 1).to(torch::kDouble)}, {"b", wave({3}, 2)}},
              {"'a': saved [6, 4] Float, expected [6, 4] Double"}},
             {{{"a", wave({7, 4}, 1)}, {"c", wave({3}, 2)}},
              {"'a': saved [6, 4] Float, expected [7, 4] Float", "'c': missing in it", "'b': in it, but not here"}}}) {
      FsdpContext ctx(mesh.device());
      auto model = make(ctx, c.weights);
      torch::optim::SGD optimizer(fsdp::parameters(*model), torch::optim::SGDOptions(0.3).momentum(0.5));
      step(*model, optimizer);
      const auto before = gathered(*model);
      const auto text = thrown<CheckpointError>([&] { load_checkpoint(folder / "c", *model, optimizer); });
      EXPECT_THAT(text, HasSubstr("load_checkpoint"));
      for (const auto& part : c.says) EXPECT_THAT(text, HasSubstr(part));
      EXPECT_TRUE(equal(gathered(*model), before));
      EXPECT_EQ(static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).lr(), 0.3);
    }
    // Not strict: names only; shapes still must fit.
    FsdpContext ctx(mesh.device());
    auto model = make(ctx, {{"a", wave({6, 4}, 7)}, {"c", wave({2}, 2)}});
    torch::optim::SGD optimizer(fsdp::parameters(*model), options);
    const auto report = load_checkpoint(folder / "c", *model, optimizer, {.strict = false});
    EXPECT_THAT(report.missing, UnorderedElementsAre("c", "optimizer/c"));
    EXPECT_THAT(report.unexpected, UnorderedElementsAre("b", "optimizer/b"));
    EXPECT_TRUE(torch::equal(gathered(*model)[1], wave({2}, 2)));
    EXPECT_FALSE(torch::equal(gathered(*model)[0], wave({6, 4}, 7)));
  });
}

// Learning rates and the like come back by the parameters' names, whatever the order of groups.
TEST(Checkpoint, OptionsComeBackByName) {
  TemporaryFolder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    using torch::optim::AdamWOptions;
    using torch::optim::OptimizerParamGroup;
    auto groups_of = [](Mlp::Impl& model, bool swapped, double lr) {
      std::vector<torch::Tensor> weights, biases;
      for (auto& p : model.named_parameters()) (p.key().ends_with("bias") ? biases : weights).push_back(p.value());
      std::vector<OptimizerParamGroup> groups;
      groups.emplace_back(weights, std::make_unique<AdamWOptions>(lr));
      groups.emplace_back(biases, std::make_unique<AdamWOptions>(lr));
      if (swapped) std::swap(groups[0], groups[1]);
      return groups;
    };
    FsdpContext a(mesh.device()), b(mesh.device());
    auto first = make_mlp(1), second = make_mlp(1);
    shard_mlp(*first, a, mesh, zero3("dp"));
    shard_mlp(*second, b, mesh, zero3("dp"));
    torch::optim::AdamW saved(groups_of(*first, false, 0.5));
    auto& weights = static_cast<AdamWOptions&>(saved.param_groups()[0].options());
    weights.lr(0.125).betas({0.5, 0.75}).weight_decay(0.3).amsgrad(true);
    auto& biases = static_cast<AdamWOptions&>(saved.param_groups()[1].options());
    biases.lr(0.0625).weight_decay(0.0).eps(1e-3);
    save_checkpoint(folder / "c", *first, saved);
    torch::optim::AdamW loaded(groups_of(*second, true, 9.0));
    load_checkpoint(folder / "c", *second, loaded);
    EXPECT_EQ(static_cast<AdamWOptions&>(loaded.param_groups()[0].options()), biases);
    EXPECT_EQ(static_cast<AdamWOptions&>(loaded.param_groups()[1].options()), weights);
    // One group for both kinds of parameters cannot have both options.
    torch::optim::AdamW one_group(fsdp::parameters(*second), AdamWOptions(7.0));
    EXPECT_THAT(thrown<CheckpointError>([&] { load_checkpoint(folder / "c", *second, one_group); }),
                AllOf(HasSubstr("blocks.0.up.weight"), HasSubstr("blocks.0.up.bias"), HasSubstr("different options")));
    EXPECT_EQ(static_cast<AdamWOptions&>(one_group.param_groups()[0].options()).lr(), 7.0);
    torch::optim::SGD other_kind(fsdp::parameters(*second), torch::optim::SGDOptions(7.0));
    EXPECT_THAT(thrown<CheckpointError>([&] { load_checkpoint(folder / "c", *second, other_kind); }),
                HasSubstr("another kind of optimizer"));
    // The module alone.
    EXPECT_THAT(load_checkpoint(folder / "c", *second).unexpected, IsEmpty());
  });
}

// Whatever LibTorch's optimizers keep comes back: three steps, a stop, and three more are six steps.
TEST(Checkpoint, EveryOptimizerOfLibTorch) {
  namespace o = torch::optim;
  const std::vector<std::pair<std::string, MakeOptimizer>> all{
      {"SGD", [](auto p) { return std::make_unique<o::SGD>(p, o::SGDOptions(0.1).momentum(0.9).nesterov(true)); }},
      {"SGD without momentum", [](auto p) { return std::make_unique<o::SGD>(p, o::SGDOptions(0.1)); }},
      {"Adam", [](auto p) { return std::make_unique<o::Adam>(p, o::AdamOptions(0.01).amsgrad(true)); }},
      {"AdamW", [](auto p) { return std::make_unique<o::AdamW>(p, o::AdamWOptions(0.01)); }},
      {"ours", [](auto p) { return std::make_unique<fsdp::optim::AdamW>(p, o::AdamWOptions(0.01)); }},
      {"Adagrad", [](auto p) { return std::make_unique<o::Adagrad>(p, o::AdagradOptions(0.1)); }},
      {"RMSprop",
       [](auto p) { return std::make_unique<o::RMSprop>(p, o::RMSpropOptions(0.01).momentum(0.5).centered(true)); }}};
  for (const auto& [name, make] : all) {
    TemporaryFolder folder;
    std::vector<torch::Tensor> expected;
    auto step = [](Mlp::Impl& model, o::Optimizer& optimizer, int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        optimizer.zero_grad();
        mlp_loss(model, input_of(s, 0, 0), target_of(s, 0, 0)).backward();
        optimizer.step();
      }
    };
    on_mesh({3}, [&, &make = make](const DeviceMesh& mesh) {
      FsdpContext ctx(mesh.device());
      auto model = make_mlp(1);
      shard_mlp(*model, ctx, mesh, zero3("dp"));
      auto optimizer = make(fsdp::parameters(*model));
      step(*model, *optimizer, 0, 3);
      save_checkpoint(folder / "c", *model, *optimizer);
      step(*model, *optimizer, 3, 6);
      const auto weights = gathered(*model);
      if (mesh.rank() == 0) expected = weights;
    });
    on_mesh({2}, [&, &name = name, &make = make](const DeviceMesh& mesh) {
      FsdpContext ctx(mesh.device());
      auto model = make_mlp(1);
      shard_mlp(*model, ctx, mesh, zero2("dp"));
      auto optimizer = make(fsdp::parameters(*model));
      load_checkpoint(folder / "c", *model, *optimizer);
      step(*model, *optimizer, 3, 6);
      const auto weights = gathered(*model);
      for (size_t i = 0; i < weights.size(); ++i)
        EXPECT_TRUE(torch::allclose(weights[i], expected[i], 1e-6, 1e-6)) << name << " " << i;
    });
  }
  // The rows of some parameters only are here: LBFGS keeps vectors of all of them.
  TemporaryFolder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Probe model(4, 3);
    shard_one(*model, ctx, mesh, zero3("dp"));
    o::LBFGS optimizer(fsdp::parameters(*model), o::LBFGSOptions(0.1).max_iter(1));
    optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = model->forward(1.0);
      loss.backward();
      return loss;
    });
    EXPECT_THAT(thrown<CheckpointError>([&] { save_checkpoint(folder / "c", *model, optimizer); }),
                HasSubstr("does not go by rows"));
    EXPECT_FALSE(std::filesystem::exists(folder / "c"));
  });
}

struct Tied : torch::nn::Module {
  torch::Tensor in, out, other;
  explicit Tied(bool tied) {
    in = register_parameter("in", wave({6, 4}, 1));
    out = tied ? register_parameter("out", in) : register_parameter("out", wave({6, 4}, 2));
    other = register_parameter("other", wave({3, 2}, 3));
  }
};

TEST(Checkpoint, TiedWeightsAreStoredOnce) {
  TemporaryFolder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext a(mesh.device()), b(mesh.device());
    auto tied = std::make_shared<Tied>(true), untied = std::make_shared<Tied>(false);
    shard_one(*tied, a, mesh, zero3("dp"));
    shard_one(*untied, b, mesh, zero3("dp"));
    torch::optim::SGD of_tied(fsdp::parameters(*tied), 0.1), of_untied(fsdp::parameters(*untied), 0.1);
    // Different values for what is one tensor there.
    save_checkpoint(folder / "untied", *untied, of_untied);
    const auto before = gathered(*tied);
    EXPECT_THAT(thrown<CheckpointError>([&] { load_checkpoint(folder / "untied", *tied, of_tied, {.strict = false}); }),
                AllOf(HasSubstr("'in' and 'out' are one tensor"), HasSubstr("different values")));
    EXPECT_TRUE(equal(gathered(*tied), before));
    {
      torch::NoGradGuard no_grad;
      FullParameters full(*untied, /*write_back=*/true);
      untied->out.copy_(untied->in);
    }
    save_checkpoint(folder / "equal", *untied, of_untied);
    load_checkpoint(folder / "equal", *tied, of_tied, {.strict = false});
    EXPECT_TRUE(torch::equal(gathered(*tied)[0], wave({6, 4}, 1)));
    save_checkpoint(folder / "tied", *tied);
    {
      torch::NoGradGuard no_grad;
      for (auto& p : untied->parameters()) p.zero_();
    }
    load_checkpoint(folder / "tied", *untied);
    EXPECT_TRUE(torch::equal(gathered(*untied)[0], wave({6, 4}, 1)));
    EXPECT_TRUE(torch::equal(gathered(*untied)[1], wave({6, 4}, 1)));
    int64_t bytes = 0;
    for (const auto& f : std::filesystem::directory_iterator(folder / "tied"))
      if (f.path().extension() == ".safetensors") {
        std::ifstream in(f.path(), std::ios::binary);
        uint64_t header = 0;
        in.read(reinterpret_cast<char*>(&header), sizeof header);
        bytes += static_cast<int64_t>(std::filesystem::file_size(f.path()) - sizeof header - header);
      }
    EXPECT_EQ(bytes, (24 + 6) * 4);
  });
}

// What is written down about each tensor: its whole shape, and the true rows of every rank.
TEST(Checkpoint, CHK02_CHK03_CHK05_TheManifestHasTrueRows) {
  auto manifest = [](const std::filesystem::path& dir) {
    std::ifstream in(dir / "manifest.json");
    return json::parse(std::string(std::istreambuf_iterator<char>(in), {}));
  };
  using Rows = std::vector<std::pair<int64_t, int64_t>>;
  for (const auto& [shape, placements] : std::vector<std::pair<std::vector<int64_t>, Placements>>{
           {{2}, zero3("dp")}, {{2, 2}, hfsdp("outer", "inner")}, {{2, 2}, hsdp("outer", "inner")}}) {
    TemporaryFolder folder;
    std::mutex mutex;
    std::map<std::string, Rows> held;
    on_mesh(shape, [&, &placements = placements](const DeviceMesh& mesh) {
      FsdpContext ctx(mesh.device());
      torch::nn::Linear model(8, 16);
      fill_by_formula(*model);
      shard_one(*model, ctx, mesh, placements);
      const auto* group = get_fsdp_module(*model)->parameter_groups()[0];
      {
        std::lock_guard lock(mutex);
        for (int64_t i = 0; i < 2; ++i) {
          const auto r = group->main_weight().local_rows(i);
          auto& rows = held[group->fqns()[static_cast<size_t>(i)]];
          if (r.begin < r.end && std::find(rows.begin(), rows.end(), std::pair(r.begin, r.end)) == rows.end())
            rows.emplace_back(r.begin, r.end);
        }
      }
      save_checkpoint(folder / "c", *model);
    });
    const auto m = manifest(folder / "c");
    EXPECT_THAT(m.at("tensors").at("weight").at("shape").as_ints(), ElementsAre(16, 8));
    EXPECT_THAT(m.at("tensors").at("bias").at("shape").as_ints(), ElementsAre(16));
    for (auto& [name, rows] : held) {
      Rows stored;
      for (const auto& piece : m.at("tensors").at(name).at("pieces").as_array())
        stored.emplace_back(piece.as_array()[1].as_int(), piece.as_array()[2].as_int());
      std::sort(rows.begin(), rows.end());
      EXPECT_EQ(stored, rows) << name;
      EXPECT_NE(rows, (Rows{{0, 8}, {8, 16}})) << name;
    }
  }
}

struct NormedImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  NormedImpl() {
    linear = register_module("linear", torch::nn::Linear(4, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    register_buffer("flags", torch::tensor({true, false, true}));
    fill_by_formula(*this);
  }
  torch::Tensor forward(torch::Tensor x) { return norm(linear(x)); }
};
FSDP_MODULE(Normed);

// Buffers, and parameters that no unit owns.
TEST(Checkpoint, BuffersAndUnmanagedParameters) {
  TemporaryFolder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext a(mesh.device()), b(mesh.device());
    auto first = std::make_shared<Normed::Impl>(), second = std::make_shared<Normed::Impl>();
    for (const auto& [model, ctx] : {std::pair{first, &a}, {second, &b}}) {
      auto scope = fully_shard_context(*ctx);
      fully_shard(*model->linear, mesh, zero3("dp"));
    }
    torch::optim::AdamW of_first(first->parameters(), 0.1), of_second(second->parameters(), 0.3);
    for (int64_t i = 0; i < 3; ++i) {
      first->forward(wave({5, 4}, static_cast<double>(i))).pow(2).sum().backward();
      of_first.step();
      of_first.zero_grad();
    }
    first->norm->running_mean.add_(static_cast<double>(mesh.rank()));  // rank 0's count
    save_checkpoint(folder / "c", *first, of_first, {.notes = {{"step", "3"}, {"said", "a \"quoted\"\nline"}}});
    second->named_buffers()["flags"].fill_(false);
    const auto report = load_checkpoint(folder / "c", *second, of_second);
    EXPECT_EQ(report.notes.at("step"), "3");
    EXPECT_EQ(report.notes.at("said"), "a \"quoted\"\nline");
    EXPECT_TRUE(torch::equal(second->norm->running_mean + mesh.rank(), first->norm->running_mean));
    EXPECT_TRUE(torch::equal(second->norm->running_var, first->norm->running_var));
    EXPECT_EQ(second->norm->num_batches_tracked.item<int64_t>(), 3);
    EXPECT_TRUE(torch::equal(second->named_buffers()["flags"], first->named_buffers()["flags"]));
    EXPECT_TRUE(torch::equal(second->norm->weight, first->norm->weight));
    EXPECT_TRUE(equal(gathered(*second), gathered(*first)));
    const auto state = [](torch::optim::AdamW& o, const torch::Tensor& p) {
      return static_cast<torch::optim::AdamWParamState&>(*o.state().at(p.unsafeGetTensorImpl()));
    };
    EXPECT_TRUE(
        torch::equal(state(of_second, second->norm->weight).exp_avg(), state(of_first, first->norm->weight).exp_avg()));
    EXPECT_EQ(state(of_second, second->norm->weight).step(), 3);
    // Parameters that should be one and are not.
    {
      torch::NoGradGuard no_grad;
      first->norm->weight.add_(static_cast<double>(mesh.rank()));
    }
    EXPECT_THAT(thrown<CheckpointError>([&] { save_checkpoint(folder / "d", *first, of_first); }),
                AllOf(HasSubstr("rank 1"), HasSubstr("'norm.weight'"), HasSubstr("CheckpointOptions::name")));
    EXPECT_FALSE(std::filesystem::exists(folder / "d"));
  });
}

// Different tensors under one name, as experts on different ranks are, need names that tell them apart.
TEST(Checkpoint, ExpertsHaveNamesOfTheirOwn) {
  TemporaryFolder folder;
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    const std::vector<MeshAxis> inner{"inner"};
    auto make = [&](FsdpContext& ctx, double value) {
      auto model = std::make_shared<Probe::Impl>(5, 3);
      torch::NoGradGuard no_grad;
      model->weight.fill_(value);
      shard_one(*model, ctx, mesh.sub(inner), zero3("inner"));
      return model;
    };
    const auto group = static_cast<double>(mesh.local_rank("outer"));
    FsdpContext a(mesh.device()), b(mesh.device()), c(mesh.device()), d(mesh.device());
    auto experts = make(a, group);
    EXPECT_THAT(thrown<CheckpointError>([&] { save_checkpoint(folder / "c", *experts); }),
                AllOf(HasSubstr("rank 2"), HasSubstr("'weight'"), HasSubstr("CheckpointOptions::name")));
    EXPECT_THAT(thrown<CheckpointError>([&] { save_safetensors(folder / "c.safetensors", *experts); }),
                AllOf(HasSubstr("rank 2"), HasSubstr("'weight'")));
    EXPECT_FALSE(std::filesystem::exists(folder / "c.safetensors"));
    CheckpointOptions options;
    options.name = [&](const std::string& fqn) { return fqn + "." + std::to_string(mesh.local_rank("outer")); };
    save_checkpoint(folder / "c", *experts, options);
    save_safetensors(folder / "c.safetensors", *experts, options);
    auto again = make(b, -1), third = make(c, -1);
    load_checkpoint(folder / "c", *again, options);
    EXPECT_EQ(off_by(gathered(*again)[0], group), 0.0);
    load_safetensors(folder / "c.safetensors", *third, options);
    EXPECT_EQ(off_by(gathered(*third)[0], group), 0.0);
    // One tensor on all: stored once.
    auto same = make(d, 4);
    save_checkpoint(folder / "same", *same);
    load_checkpoint(folder / "same", *again);
  });
}

// Outside the rest state, or with arguments that do not fit together, nothing is written and every rank hears of it.
TEST(Checkpoint, RefusesWhatIsNotAtRestOnAllRanks) {
  TemporaryFolder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    auto model = make_mlp(1);
    shard_mlp(*model, ctx, mesh, zero3("dp"));
    torch::optim::SGD optimizer(fsdp::parameters(*model), 0.1);
    auto refused = [&](const std::string& text) {
      EXPECT_THAT(thrown<StateError>([&] { save_checkpoint(folder / "c", *model, optimizer); }), HasSubstr(text));
      EXPECT_THAT(thrown<StateError>([&] { load_checkpoint(folder / "good", *model, optimizer); }), HasSubstr(text));
    };
    save_checkpoint(folder / "good", *model, optimizer);
    auto* block = get_fsdp_module(*model->blocks[0]);
    block->unshard();
    refused("unsharded by hand");
    block->reshard();
    {
      FullParameters full(*model);
      refused("FullParameters");
    }
    // On one rank only.
    CheckpointOptions fails;
    fails.name = [&](const std::string& fqn) {
      if (mesh.rank() == 1) throw StateError("no names today");
      return fqn;
    };
    EXPECT_THAT(thrown<StateError>([&] { save_checkpoint(folder / "c", *model, optimizer, fails); }),
                HasSubstr("save_checkpoint: rank 1: no names today"));
    EXPECT_THAT(thrown<StateError>([&] { load_checkpoint(folder / "good", *model, optimizer, fails); }),
                HasSubstr("load_checkpoint: rank 1: no names today"));
    // In the middle of a backward.
    auto x = input_of(0, 0, 0).set_requires_grad(true);
    auto loss = mlp_loss(*model, x, target_of(0, 0, 0));
    int calls = 0;
    x.register_hook([&](torch::Tensor) {
      ++calls;
      refused("in phase");
    });
    loss.backward();
    EXPECT_EQ(calls, 1);
    optimizer.step();
    // Somebody else's parameters.
    torch::optim::SGD stranger({torch::ones({2}, torch::requires_grad())}, 0.1);
    EXPECT_THAT(thrown<ValueError>([&] { save_checkpoint(folder / "c", *model, stranger); }),
                HasSubstr("the module has not"));
    EXPECT_THAT(thrown<ValueError>([&] { load_checkpoint(folder / "good", *model, stranger); }),
                HasSubstr("the module has not"));
    EXPECT_THAT(thrown<ValueError>([&] { save_checkpoint("", *model); }), HasSubstr("empty"));
    EXPECT_THAT(thrown<ValueError>([&] { save_checkpoint(folder / std::to_string(mesh.rank()), *model); }),
                AllOf(HasSubstr("the same path"), HasSubstr("rank 1 has")));
    EXPECT_THAT(thrown<CheckpointError>([&] { save_checkpoint(folder / "good", *model); }), HasSubstr("exists"));
    CheckpointOptions one_name;
    one_name.name = [](const std::string&) { return "x"; };
    EXPECT_THAT(thrown<ValueError>([&] { save_checkpoint(folder / "c", *model, one_name); }),
                HasSubstr("'blocks.0.up.weight' and 'blocks.0.up.bias' are both called 'x'"));
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      EXPECT_EQ(entry.path().filename(), "good");
    // Between forward and backward, and between a gradient and its step, both work.
    auto pending = mlp_loss(*model, input_of(0, 0, 0), target_of(0, 0, 0));
    save_checkpoint(folder / "between", *model, optimizer);
    pending.backward();
    load_checkpoint(folder / "between", *model, optimizer);
    expect_at_rest(*model);
  });
}

// A checkpoint that something happened to is refused with the file's name, and nothing is changed.
TEST(Checkpoint, DamageIsFound) {
  namespace fs = std::filesystem;
  TemporaryFolder folder;
  auto damage = [&](const std::string& name, const std::function<void(const fs::path&)>& how) {
    fs::copy(folder / "good", folder / name);
    how(folder / name);
  };
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Probe model(5, 3);
    shard_one(*model, ctx, mesh, zero3("dp"));
    torch::optim::SGD optimizer(fsdp::parameters(*model), 0.1);
    save_checkpoint(folder / "good", *model, optimizer);
    save_safetensors(folder / "good.safetensors", *model);
  });
  damage("cut", [](const fs::path& dir) { fs::resize_file(dir / "rank-00001.safetensors", 60); });
  damage("lost", [](const fs::path& dir) { fs::remove(dir / "rank-00000.safetensors"); });
  damage("no-manifest", [](const fs::path& dir) { fs::remove(dir / "manifest.json"); });
  damage("half-manifest", [](const fs::path& dir) { fs::resize_file(dir / "manifest.json", 100); });
  damage("other", [](const fs::path& dir) { std::ofstream(dir / "manifest.json") << R"({"format":"else"})"; });
  std::ofstream(folder / "short.safetensors") << "abc";
  std::ofstream(folder / "text.safetensors") << "this is not a file of tensors";
  fs::copy(folder / "good.safetensors", folder / "cut.safetensors");
  fs::resize_file(folder / "cut.safetensors", fs::file_size(folder / "good.safetensors") - 4);
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Probe model(5, 3);
    shard_one(*model, ctx, mesh, zero3("dp"));
    {
      torch::NoGradGuard no_grad;
      model->weight.fill_(7);
    }
    torch::optim::SGD optimizer(fsdp::parameters(*model), 0.1);
    for (const auto& [name, text] :
         std::vector<std::pair<std::string, std::string>>{{"cut", "rank-00001.safetensors is damaged"},
                                                          {"lost", "rank-00000.safetensors is missing"},
                                                          {"no-manifest", "has no manifest.json"},
                                                          {"half-manifest", "manifest.json"},
                                                          {"other", "not a manifest"},
                                                          {"nowhere", "there is no checkpoint"}})
      EXPECT_THAT(thrown<CheckpointError>([&] { load_checkpoint(folder / name, *model, optimizer); }), HasSubstr(text));
    for (const auto& [name, text] :
         std::vector<std::pair<std::string, std::string>>{{"short.safetensors", "it has 3 bytes"},
                                                          {"text.safetensors", "is no safetensors file"},
                                                          {"cut.safetensors", "tensor \"weight\" should end"},
                                                          {"nowhere", "there is no"}})
      EXPECT_THAT(thrown<CheckpointError>([&] { load_safetensors(folder / name, *model); }), HasSubstr(text));
    EXPECT_EQ(off_by(gathered(*model)[0], 7.0), 0.0);
    load_checkpoint(folder / "good", *model, optimizer);
    EXPECT_EQ(off_by(gathered(*model)[0], 1.0), 0.0);
  });
}

TEST(Checkpoint, MetaModelsAreFilledByALoad) {
  TemporaryFolder folder;
  auto make = [](FsdpContext& ctx, const DeviceMesh& mesh, bool meta) {
    using Named = std::vector<std::pair<std::string, torch::Tensor>>;
    const auto values = Named{{"a", wave({6, 4}, 1)}, {"b", wave({3}, 2)}};
    const auto none = Named{{"a", torch::empty({6, 4}, torch::kMeta)}, {"b", torch::empty({3}, torch::kMeta)}};
    auto model = std::make_shared<Weights::Impl>(meta ? none : values);
    shard_one(*model, ctx, mesh, zero3("dp"));
    return model;
  };
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    auto model = make(ctx, mesh, false);
    save_checkpoint(folder / "c", *model);
    save_safetensors(folder / "c.safetensors", *model);
  });
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    for (const bool as_file : {false, true}) {
      FsdpContext ctx(mesh.device());
      auto model = make(ctx, mesh, true);
      EXPECT_THAT(thrown<StateError>([&] { save_checkpoint(folder / "d", *model); }), HasSubstr("has no values yet"));
      if (as_file)
        load_safetensors(folder / "c.safetensors", *model);
      else
        load_checkpoint(folder / "c", *model);
      EXPECT_TRUE(equal(gathered(*model), {wave({6, 4}, 1), wave({3}, 2)}));
      EXPECT_NO_THROW(model->forward());
    }
  });
}

// One file of the whole model, from and to any sharding, whatever the dtype; an earlier file is replaced.
TEST(Checkpoint, WholeModelsAsSafetensors) {
  TemporaryFolder folder;
  std::vector<torch::Tensor> weights;
  for (const int64_t ranks : {4, 1})
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      FsdpContext ctx(mesh.device());
      auto model = std::make_shared<Odd>();
      shard_odd(*model, ctx, mesh, zero3("dp"));
      save_safetensors(folder / "m.safetensors", *model, {.notes = {{"format", "pt"}}});
      const auto w = gathered(*model);
      if (mesh.rank() == 0) weights = w;
    });
  EXPECT_FALSE(std::filesystem::exists(folder / "m.safetensors.incomplete"));
  std::filesystem::create_directory(folder / "split");
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    FsdpContext a(mesh.device()), b(mesh.device());
    auto model = std::make_shared<Odd>();
    shard_odd(*model, a, mesh, hfsdp("outer", "inner"), ShardLayout::kUnpadded);
    auto zero = [](torch::nn::Module& m) {
      torch::NoGradGuard no_grad;
      for (auto& p : m.parameters()) p.zero_();
    };
    zero(*model);
    const auto report = load_safetensors(folder / "m.safetensors", *model);
    EXPECT_EQ(report.notes.at("format"), "pt");
    EXPECT_TRUE(equal(gathered(*model), weights));
    // A folder of several files, into other dtypes.
    save_safetensors(folder / "split" / "1.safetensors", *model->first, {.name = [](auto& n) { return "first." + n; }});
    save_safetensors(folder / "split" / "2.safetensors", *model->second,
                     {.name = [](auto& n) { return "second." + n; }});
    auto doubles = std::make_shared<Odd>();
    doubles->to(torch::kDouble);
    shard_odd(*doubles, b, mesh, hsdp("outer", "inner"));
    zero(*doubles);
    load_safetensors(folder / "split", *doubles);
    const auto loaded = gathered(*doubles);
    for (size_t i = 0; i < loaded.size(); ++i) EXPECT_TRUE(torch::equal(loaded[i], weights[i].to(torch::kDouble))) << i;
    EXPECT_THAT(thrown<CheckpointError>([&] { load_safetensors(folder / "split" / "1.safetensors", *model); }),
                AllOf(HasSubstr("'second.p0': missing in it"), Not(HasSubstr("'first"))));
  });
}

// Without units a module is the process's own: the same functions, without ranks.
TEST(Checkpoint, AModuleWithoutUnits) {
  TemporaryFolder folder;
  Odd model, other;
  auto optimizer = adamw(fsdp::parameters(model)), other_optimizer = adamw(fsdp::parameters(other));
  steps(model, *optimizer, 0, 3);
  save_checkpoint(folder / "deep" / "er" / "c/", model, *optimizer);
  load_checkpoint(folder / "deep" / "er" / "c", other, *other_optimizer);
  EXPECT_EQ(steps(model, *optimizer, 3, 6), steps(other, *other_optimizer, 3, 6));
  EXPECT_TRUE(equal(model.parameters(), other.parameters()));
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    auto sharded = std::make_shared<Odd>();
    shard_odd(*sharded, ctx, mesh, zero3("dp"));
    auto o = adamw(fsdp::parameters(*sharded));
    load_checkpoint(folder / "deep" / "er" / "c", *sharded, *o);
    steps(*sharded, *o, 3, 6);
    const auto weights = gathered(*sharded);
    for (size_t i = 0; i < weights.size(); ++i)
      EXPECT_TRUE(torch::allclose(weights[i], model.parameters()[i], 1e-6, 1e-6)) << i;
  });
}

// FSDP2's spelling has no context to finalize: saving and loading before the first forward do it.
TEST(Checkpoint, CompatUnitsBeforeTheirFirstForward) {
  TemporaryFolder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    auto make = [&] {
      auto model = make_mlp(1);
      for (auto& block : *model->blocks) compat::fully_shard(*block, {.mesh = mesh});
      compat::fully_shard(*model, {.mesh = mesh});
      return model;
    };
    auto first = make(), second = make();
    torch::optim::SGD optimizer(fsdp::parameters(*first), 0.1), other(fsdp::parameters(*second), 0.2);
    save_checkpoint(folder / "c", *first, optimizer);
    load_checkpoint(folder / "c", *second, other);
    mlp_loss(*second, input_of(0, 0, 0), target_of(0, 0, 0)).backward();
    other.step();
  });
}

/// As AdamW, but its load() fails when told to.
struct Picky : torch::optim::AdamW {
  using AdamW::AdamW;
  bool refuses = false;
  void load(torch::serialize::InputArchive& archive) override {
    AdamW::load(archive);
    if (refuses) throw std::runtime_error("not today");
  }
};

// What only shows when values are put in their places, on one rank, still changes nothing on any.
TEST(Checkpoint, AFailureAtTheEndIsUndoneEverywhere) {
  TemporaryFolder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Probe model(5, 3);
    shard_one(*model, ctx, mesh, zero3("dp"));
    Picky optimizer(fsdp::parameters(*model), torch::optim::AdamWOptions(0.1).amsgrad(true));
    auto step = [&] {
      model->forward(1.0).backward();
      optimizer.step();
    };
    step();
    save_checkpoint(folder / "c", *model, optimizer);
    step();
    static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(0.5);
    const auto weights = gathered(*model)[0], moments = gathered_moments(*model, optimizer)[0];
    optimizer.refuses = mesh.rank() == 1;
    EXPECT_THAT(thrown<CheckpointError>([&] { load_checkpoint(folder / "c", *model, optimizer); }),
                HasSubstr("rank 1: not today"));
    EXPECT_EQ(static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(), 0.5);
    EXPECT_TRUE(torch::equal(gathered(*model)[0], weights));
    EXPECT_TRUE(torch::equal(gathered_moments(*model, optimizer)[0], moments));
    optimizer.refuses = false;
    // A buffer that cannot be written to.
    model->register_buffer("table", torch::ones({4}));
    save_checkpoint(folder / "d", *model, optimizer);
    FsdpContext other_ctx(mesh.device());
    Probe other(5, 3);
    other->register_buffer("table", mesh.rank() == 1 ? torch::zeros({1}).expand({4}) : torch::zeros({4}));
    shard_one(*other, other_ctx, mesh, zero3("dp"));
    const auto before = gathered(*other)[0];
    EXPECT_THAT(thrown<CheckpointError>([&] { load_checkpoint(folder / "d", *other); }),
                AllOf(HasSubstr("rank 1"), HasSubstr("'table' cannot be written")));
    EXPECT_TRUE(torch::equal(gathered(*other)[0], before));
  });
}

// Ranks that do not do the same, and names that are not the same tensor on all of them.
TEST(Checkpoint, RanksThatDifferAreRefused) {
  TemporaryFolder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const bool second = mesh.rank() == 1;
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      Probe model(5, 3);
      shard_one(*model, ctx, mesh, s.placements);
      torch::optim::AdamW optimizer(fsdp::parameters(*model), 0.1);
      auto save = [&] {
        if (second)
          save_checkpoint(folder / "c", *model);
        else
          save_checkpoint(folder / "c", *model, optimizer);
      };
      EXPECT_THAT(thrown<ValueError>(save),
                  AllOf(HasSubstr("'weight' is unstepped"), HasSubstr("untrained on rank 1")));
      const auto good = folder / s.name;
      save_checkpoint(good, *model, optimizer);
      auto load = [&] {
        if (second)
          load_checkpoint(good, *model);
        else
          load_checkpoint(good, *model, optimizer);
      };
      EXPECT_THAT(thrown<ValueError>(load), HasSubstr("without an optimizer"));
    }
    // A dtype that no file can hold, on one rank; both functions still work afterwards.
    FsdpContext ctx(mesh.device());
    Probe model(5, 3);
    shard_one(*model, ctx, mesh, zero3("dp"));
    model->register_buffer("table", torch::ones({4}, second ? torch::kComplexDouble : torch::kFloat));
    EXPECT_THAT(thrown<CheckpointError>([&] { save_safetensors(folder / "m.safetensors", *model); }),
                AllOf(HasSubstr("rank 1"), HasSubstr("table"), HasSubstr("ComplexDouble")));
    Probe fine(5, 3);
    FsdpContext fine_ctx(mesh.device());
    shard_one(*fine, fine_ctx, mesh, zero3("dp"));
    save_safetensors(folder / "m.safetensors", *fine);
    EXPECT_THAT(thrown<ValueError>([&] {
                  save_safetensors(folder / "m.safetensors", *fine, {.notes = {{"weight", "x"}}});
                }),
                HasSubstr("note 'weight'"));
    // Tied on one rank, a tensor of its own on the other.
    struct Pair : torch::nn::Module {
      Probe probe{4, 2};
      explicit Pair(bool tied) {
        register_module("probe", probe);
        auto a = register_buffer("a", torch::ones({2}));
        register_buffer("b", tied ? a : torch::zeros({2}));
      }
    };
    auto pair = std::make_shared<Pair>(!second);
    FsdpContext pair_ctx(mesh.device());
    {
      auto scope = fully_shard_context(pair_ctx);
      fully_shard(pair->probe, mesh, zero3("dp"));
    }
    for (const bool file : {false, true})
      EXPECT_THAT(thrown<CheckpointError>([&] {
                    if (file)
                      save_safetensors(folder / "p.safetensors", *pair);
                    else
                      save_checkpoint(folder / "p", *pair);
                  }),
                  HasSubstr("'b' is another name of 'a' on one rank"));
  });
}

// Replicas that drifted apart: what is saved is one of them.
TEST(Checkpoint, OneReplicaIsSaved) {
  TemporaryFolder folder;
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    for (const auto& s : two_axes()) {
      if (s.name == "hfsdp") continue;
      FsdpContext a(mesh.device()), b(mesh.device());
      torch::nn::Linear drifted(3, 4), loaded(3, 4);
      fill_by_formula(*drifted);
      fill_by_formula(*loaded);
      shard_one(*drifted, a, mesh, s.placements);
      shard_one(*loaded, b, mesh, s.placements);
      {
        torch::NoGradGuard no_grad;
        for (auto& p : drifted->parameters()) p.fill_(static_cast<double>(mesh.local_rank("outer")));
      }
      save_checkpoint(folder / "c", *drifted);
      load_checkpoint(folder / "c", *loaded);
      for (const auto& p : gathered(*loaded)) EXPECT_EQ(off_by(p, 0.0), 0.0);
    }
  });
}

// Whatever is written in a manifest, reading it is an error or right: never other bytes.
TEST(Checkpoint, ManifestsAreChecked) {
  namespace fs = std::filesystem;
  TemporaryFolder folder;
  auto save = [&](const std::string& name, double value) {
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      FsdpContext ctx(mesh.device());
      Probe model(5, 3);
      shard_one(*model, ctx, mesh, zero3("dp"));
      torch::optim::AdamW optimizer(fsdp::parameters(*model), 0.1);
      model->forward(1.0).backward();
      optimizer.step();
      {
        torch::NoGradGuard no_grad;
        model->weight.fill_(value);
      }
      save_checkpoint(folder / name, *model, optimizer);
    });
  };
  save("good", 1.0);
  save("other", 2.0);
  auto text_of = [&](const std::string& name) {
    std::ifstream in(folder / name / "manifest.json");
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const auto good = text_of("good");
  int count = 0;
  auto changed = [&](const std::string& from, const std::string& to) {
    const auto name = "bad" + std::to_string(count++);
    fs::copy(folder / "good", folder / name);
    auto text = good;
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from << " in " << good;
    if (at != std::string::npos) text.replace(at, from.size(), to);
    std::ofstream(folder / name / "manifest.json") << text;
    return name;
  };
  // tensors: {"weight":{"dtype":"F32","shape":[5,3],"pieces":[["rank-00000.safetensors",0,3,N],...
  const std::string piece = R"(["rank-00000.safetensors",0,)";
  ASSERT_NE(good.find(piece), std::string::npos) << good;
  std::vector<std::string> bad{
      changed(piece, R"(["/etc/passwd",0,)"),
      changed(piece, R"(["../other/rank-00000.safetensors",0,)"),
      changed(piece, R"(["rank-00000.safetensors",-3,)"),
      changed(piece, R"(["rank-00000.safetensors",1,)"),
      changed(R"("shape":[5,3])", R"("shape":[5,4611686018427387904])"),
      changed(R"("shape":[5,3])", R"("shape":[-5,3])"),
      changed(R"("shape":[5,3])", R"("shape":[6,3])"),
      changed(R"("dtype":"F32")", R"("dtype":"F64")"),
      changed(R"("dtype":"F32")", R"("dtype":"F99")"),
      changed(R"("world_size":2)", R"("world_size":-1)"),
      changed("\"exp_avg\"", "\"exp_bvg\""),
      changed(R"("step":1)", R"("step":"x")"),
      changed(R"("lr":0.1)", R"("lr":{"real":"zz"})"),
      changed(R"({"tuple":[0.9)", R"({"integers":["a")"),
  };
  // A file of another save, of the same size.
  fs::copy(folder / "good", folder / "mixed");
  fs::copy_file(folder / "other" / "rank-00001.safetensors", folder / "mixed" / "rank-00001.safetensors",
                fs::copy_options::overwrite_existing);
  bad.push_back("mixed");
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Probe model(5, 3);
    shard_one(*model, ctx, mesh, zero3("dp"));
    torch::optim::AdamW optimizer(fsdp::parameters(*model), 0.25);
    for (const auto& name : bad) {
      const auto text = thrown<CheckpointError>([&] { load_checkpoint(folder / name, *model, optimizer); });
      EXPECT_THAT(text, HasSubstr("load_checkpoint")) << name;
      EXPECT_EQ(off_by(gathered(*model)[0], 1.0), 0.0) << name;
      EXPECT_TRUE(optimizer.state().empty()) << name;
      EXPECT_EQ(static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(), 0.25) << name;
    }
    load_checkpoint(folder / "other", *model, optimizer);
    EXPECT_EQ(off_by(gathered(*model)[0], 2.0), 0.0);
  });
}

// Lazily conjugated values, names and dtypes that other programs write.
TEST(Checkpoint, OddContentsOfFiles) {
  TemporaryFolder folder;
  Probe model(2, 2), other(2, 2);
  const auto value = torch::complex(torch::ones({3}), torch::full({3}, 2.0f));
  model->register_buffer("turned", value.conj());
  other->register_buffer("turned", torch::zeros({3}, torch::kComplexFloat));
  save_checkpoint(folder / "c", *model);
  load_checkpoint(folder / "c", *other);
  EXPECT_TRUE(torch::equal(other->named_buffers()["turned"], value.conj().resolve_conj()));
  // A tensor that nobody asks for, of a dtype that LibTorch lacks; and a name in the metadata beyond ASCII.
  const std::string json =
      R"({"__metadata__":{"by":"Ren\u00e9","best":"weight"},"weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
      R"("strange":{"dtype":"F4","shape":[2],"data_offsets":[16,17]}})";
  {
    std::ofstream out(folder / "f.safetensors", std::ios::binary);
    const uint64_t size = json.size();
    out.write(reinterpret_cast<const char*>(&size), sizeof size);
    const float data[4] = {1, 2, 3, 4};
    out << json;
    out.write(reinterpret_cast<const char*>(data), sizeof data);
    out << 'x';
  }
  Probe plain(2, 2);
  EXPECT_THAT(thrown<CheckpointError>([&] { load_safetensors(folder / "f.safetensors", *plain); }),
              HasSubstr("'strange': in it, but not here"));
  const auto report = load_safetensors(folder / "f.safetensors", *plain, {.strict = false});
  EXPECT_THAT(report.unexpected, ElementsAre("strange"));
  EXPECT_EQ(report.notes.at("by"), "Ren\xc3\xa9");
  EXPECT_EQ(report.notes.at("best"), "weight");
  EXPECT_EQ(plain->weight[1][1].item<float>(), 4.0f);
}

// What an aborted save left is in nobody's way.
TEST(Checkpoint, B51_AnIncompleteOneIsReplaced) {
  TemporaryFolder folder;
  std::filesystem::create_directories(folder / "c.incomplete");
  std::ofstream(folder / "c.incomplete/rank-00000.safetensors") << "rest";
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Probe model(5, 3);
    shard_one(*model, ctx, mesh, zero3("dp"));
    EXPECT_THAT(thrown<CheckpointError>([&] { load_checkpoint(folder / "c", *model); }),
                AllOf(HasSubstr("there is no checkpoint"), HasSubstr("save that did not end")));
    save_checkpoint(folder / "c", *model);
    load_checkpoint(folder / "c", *model);
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "c.incomplete"));
}

}  // namespace
}  // namespace fsdp::testing
