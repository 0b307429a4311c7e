/// fsdp::optim::AdamW: torch's numbers, from flat shards.
#include <sstream>

#include <fsdp/adamw.h>

#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::optim::AdamWOptions;

AdamWOptions some_options(bool amsgrad) {
  return AdamWOptions(0.02).betas({0.8, 0.95}).weight_decay(0.1).eps(1e-6).amsgrad(amsgrad);
}

TEST(AdamW, StepsLikeTorch) {
  for (bool amsgrad : {false, true}) {
    const MakeOptimizer theirs = [=](std::vector<torch::Tensor> p) {
      return std::make_unique<torch::optim::AdamW>(std::move(p), some_options(amsgrad));
    };
    const MakeOptimizer ours = [=](std::vector<torch::Tensor> p) {
      return std::make_unique<optim::AdamW>(std::move(p), some_options(amsgrad));
    };
    // Without any unit too.
    EXPECT_LT(difference(reference_run(1, 2, 6, 1, true, theirs), reference_run(1, 2, 6, 1, true, ours)), 1e-6);
    for (const auto& shape : std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {4}, {2, 2}}) {
      int64_t ranks = 1;
      for (auto s : shape) ranks *= s;
      const auto reference = reference_run(ranks, 2, 6, 3, true, theirs);
      on_mesh(shape, [&](const DeviceMesh& mesh) {
        for (const auto& s : mesh.ndim() == 1 ? one_axis() : two_axes())
          for (auto layout : {ShardLayout::kPadded, ShardLayout::kUnpadded})
            EXPECT_LT(difference(reference, sharded_run(mesh, s.placements, 2, 6, 3, true, layout, {}, {}, ours)), 1e-6)
                << s.name << " on " << ranks;
      });
    }
  }
}

/// Steps of a model in which the last block gets no gradient at first, with two groups of options, one of which
/// changes.
std::vector<torch::Tensor> uneven_run(Mlp::Impl& model, torch::optim::Optimizer& optimizer, int64_t rank) {
  for (int64_t step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    if (step == 3) static_cast<AdamWOptions&>(optimizer.param_groups()[1].options()).lr(0.001);
    auto x = input_of(step, 0, rank);
    for (size_t b = 0; b < (step < 2 ? 1u : 2u); ++b)
      x = x + model.blocks[static_cast<size_t>(b)]->as<Block>()->forward(x);
    (torch::matmul(x, torch::ones({6, 1})).pow(2).mean() + model.head(x).sum() * 0.01).backward();
    optimizer.step();
  }
  return gathered(model);
}

std::vector<torch::optim::OptimizerParamGroup> two_groups(Mlp::Impl& model) {
  std::vector<torch::Tensor> decay, none;
  for (auto& p : model.named_parameters())
    (p.key().find("weight") != std::string::npos ? decay : none).push_back(p.value());
  return {{decay, std::make_unique<AdamWOptions>(some_options(false))},
          {none, std::make_unique<AdamWOptions>(AdamWOptions(0.01).weight_decay(0))}};
}

TEST(AdamW, GroupsOfOptionsAndMissingGradients) {
  auto reference = make_mlp(2);
  torch::optim::AdamW theirs(two_groups(*reference), AdamWOptions(0.1));
  const auto expected = uneven_run(*reference, theirs, 0);
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      auto model = make_mlp(2);
      {
        auto scope = fully_shard_context(ctx);
        for (auto& b : *model->blocks) fully_shard(*b, mesh, s.placements);
        fully_shard(model->head, mesh, s.placements);
      }
      optim::AdamW ours(two_groups(*model), AdamWOptions(0.1));
      const auto got = uneven_run(*model, ours, 0);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_LT(off_by(got[i] - expected[i], 0), 1e-6) << s.name << " " << i;
    }
  });
}

TEST(AdamW, MomentsLiveInOneBufferAndSurviveSaving) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    auto model = make_mlp(1);
    shard_mlp(*model, ctx, mesh, zero3("dp"));
    const auto parameters = fsdp::parameters(*model->blocks[0]);
    auto step = [&](torch::optim::Optimizer& o, int64_t s) {
      o.zero_grad();
      mlp_loss(*model, input_of(s, 0, mesh.rank()), target_of(s, 0, mesh.rank())).backward();
      o.step();
    };
    optim::AdamW first(fsdp::parameters(*model), some_options(false));
    for (int64_t s = 0; s < 3; ++s) step(first, s);
    const c10::StorageImpl* flat = nullptr;
    for (const auto& p : parameters) {
      const auto& state = static_cast<torch::optim::AdamWParamState&>(*first.state().at(p.unsafeGetTensorImpl()));
      EXPECT_EQ(state.step(), 3);
      EXPECT_EQ(state.exp_avg().sizes(), p.sizes());
      const auto* storage = state.exp_avg().storage().unsafeGetStorageImpl();
      EXPECT_EQ(flat ? flat : storage, storage);
      flat = storage;
    }
    std::stringstream file;
    torch::save(first, file);
    optim::AdamW second(fsdp::parameters(*model), AdamWOptions(1.0));
    torch::load(second, file);
    const auto before = gathered(*model);
    for (int64_t s = 3; s < 6; ++s) step(first, s);
    const auto expected = gathered(*model);
    {
      torch::NoGradGuard no_grad;
      FullParameters full(*model, /*write_back=*/true);
      auto all = fsdp::parameters(*model);
      for (size_t i = 0; i < all.size(); ++i) all[i].copy_(before[i]);
    }
    for (int64_t s = 3; s < 6; ++s) step(second, s);
    const auto got = gathered(*model);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::equal(got[i], expected[i])) << i;
  });
}

TEST(AdamW, GradientsOfAnotherDtypeAndUnreducedOnes) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Probe probe(4, 3, at::kBFloat16);
    shard_one(*probe, ctx, mesh, zero1("dp"));
    optim::AdamW adam(fsdp::parameters(*probe), AdamWOptions(0.25).weight_decay(0));
    {
      auto scope = microbatch(ctx, false);
      probe->forward(1.0).backward();
    }
    EXPECT_THAT(thrown<StateError>([&] { adam.step(); }), HasSubstr("not reduced"));
    {
      torch::NoGradGuard no_grad;
      EXPECT_EQ(off_by(probe->weight + 0, 1), 0);
    }
    probe->forward(1.0).backward();
    EXPECT_EQ(probe->weight.grad().scalar_type(), torch::kBFloat16);
    adam.step([&] { return torch::ones({}); });
    EXPECT_EQ(probe->weight.scalar_type(), torch::kFloat);
    EXPECT_EQ(probe->forward(1.0).item<double>(), 9);
  });
}

}  // namespace
}  // namespace fsdp::testing
