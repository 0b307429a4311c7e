/// Cases of the Python system that no other test covers, by their ids, each with its goal where the system falls short.
#include <algorithm>

#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct TinyImpl : torch::nn::Module {
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  TinyImpl() {
    fc1 = register_module("fc1", torch::nn::Linear(8, 16));
    fc2 = register_module("fc2", torch::nn::Linear(16, 4));
  }
  torch::Tensor forward(torch::Tensor x) { return fc2(torch::relu(fc1(x))); }
};
FSDP_MODULE(Tiny);

void shard_tiny(Tiny& m, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& placements) {
  auto scope = fully_shard_context(ctx);
  fully_shard(m->fc1, mesh, placements);
  fully_shard(m->fc2, mesh, placements);
}

// A weight of a unit read outside its forward and backward is this rank's rows, never the full tensor of another use.
TEST(Cases, FSH29_OutsideItsForwardAWeightIsTheShard) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Tiny m;
    fill_by_formula(*m);
    shard_tiny(m, ctx, mesh, zero3("dp"));
    m(wave({3, 8}, 1.0)).sum().backward();
    const auto rows = get_fsdp_module(*m->fc1)->parameter_groups()[0]->main_weight().local_rows(0);
    EXPECT_EQ(m->fc1->weight.size(0), rows.end - rows.begin);
    torch::NoGradGuard no_grad;
    EXPECT_EQ((m->fc1->weight + 0).sizes(), m->fc1->weight.sizes());
    EXPECT_LT(m->fc1->weight.size(0), 16);
  });
}

// A bf16 model under Adam follows the unsharded bf16 model, although its weights are kept in fp32.
TEST(Cases, FSH49_LowPrecisionFollowsTheUnshardedModel) {
  auto data = [](int64_t columns, double seed) { return wave({3, columns}, seed).to(torch::kBFloat16); };
  auto make = [] {
    torch::manual_seed(2026);
    Tiny m;
    m->to(torch::kBFloat16);
    return m;
  };
  auto steps = [&](Tiny& m) {
    torch::optim::Adam adam(fsdp::parameters(*m), 0.01);
    std::vector<double> losses;
    for (int s = 0; s < 3; ++s) {
      adam.zero_grad();
      auto loss = torch::mse_loss(m(data(8, 1.0)).to(torch::kFloat), data(4, 2.0).to(torch::kFloat));
      loss.backward();
      adam.step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  auto reference = make();
  const auto expected = steps(reference);
  EXPECT_LT(expected[2], expected[0]);
  std::vector<Tiny> models{make(), make()};  // the generator is the process's
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    auto m = models[static_cast<size_t>(mesh.rank())];
    shard_tiny(m, ctx, mesh, zero3("dp"));
    const auto got = steps(m);
    for (size_t s = 0; s < got.size(); ++s) EXPECT_NEAR(got[s], expected[s], 3e-3) << s;
  });
}

// The forward leaves the static order, so a prefetch is for nothing; the weights change before the unit runs at last.
TEST(Cases, FSH58_AStrayPrefetchIsNeverUsedStale) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    std::vector<Probe> units{Probe(4, 4), Probe(4, 4), Probe(4, 4)};
    {
      auto scope = fully_shard_context(ctx);
      for (auto& u : units) fully_shard(u, mesh, zero3("dp"));
    }
    torch::NoGradGuard no_grad;
    EXPECT_EQ(units[0](1.0).item<double>(), 16.0);
    units[1]->weight.fill_(5.0);
    EXPECT_EQ(units[1](1.0).item<double>(), 80.0);
    for (auto& u : units) EXPECT_LE(gathered_bytes(*u), 4 * 4 * 4);
  });
}

// What a plan needs several axes for is planned, or refused, at construction: nothing is left to the first use.
TEST(Cases, FSH61_FSH63_FSH64_EveryChangeIsPlannedAtConstruction) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const std::vector<MeshAxis> axes{"outer", "inner"};
    const Placement r = Replicate{}, s = Shard{0}, p = Partial{};
    for (const auto& [placements, first, second] : std::vector<std::tuple<Placements, std::string, std::string>>{
             {{axes, {s, s}, {s, s}, {s, s}}, "all_gather over 'outer'", "all_gather over 'inner'"},
             {{axes, {r, r}, {p, p}, {r, r}}, "all_reduce over 'inner'", "all_reduce over 'outer'"},
             {{axes, {r, r}, {p, s}, {s, s}}, "reduce_scatter over 'inner'", "reduce_scatter over 'outer'"}}) {
      FsdpContext ctx(mesh.device());
      Tiny m;
      fill_by_formula(*m);
      shard_tiny(m, ctx, mesh, placements);
      m(wave({3, 8}, 1.0)).sum().backward();
      const auto plan = get_fsdp_module(*m->fc1)->describe();
      EXPECT_LT(plan.find(first), plan.size()) << plan;
      EXPECT_LT(plan.find(second), plan.size()) << plan;
    }
    FsdpContext ctx(mesh.device());
    Tiny m;
    auto scope = fully_shard_context(ctx);
    EXPECT_THAT(thrown<ValueError>([&] { fully_shard(m, mesh, {axes, {s, r}, {s, r}, {s, r}}); }), HasSubstr("inner"));
    EXPECT_EQ(get_fsdp_module(*m), nullptr);
  });
}

// The outer reduction goes out unit by unit, inside the backward: not after it, and not at the optimizer step.
TEST(Cases, HSD12_OuterReductionsAreInsideBackward) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (const auto& s : two_axes()) {
      FsdpContext ctx(mesh.device());
      auto model = make_mlp(2);
      shard_mlp(*model, ctx, mesh, s.placements);
      auto loss = mlp_loss(*model, input_of(0, 0, 0), target_of(0, 0, 0));
      CollectiveLog log(mesh.world());
      loss.backward();
      const auto records = log.records();
      auto reduces = [](const char* axes) {
        return [=](const CollectiveRecord& r) {
          return r.axes == axes && r.operation.find("reduce") != std::string::npos;
        };
      };
      EXPECT_EQ(std::count_if(records.begin(), records.end(), reduces("inner")), 3) << s.name;
      EXPECT_EQ(std::count_if(records.begin(), records.end(), reduces("outer")), 3) << s.name;
      const auto first_outer = std::find_if(records.begin(), records.end(), reduces("outer"));
      const auto last_inner = std::find_if(records.rbegin(), records.rend(), reduces("inner")).base();
      EXPECT_LT(first_outer - records.begin(), last_inner - records.begin()) << s.name;
    }
  });
}

struct MetaPairImpl : torch::nn::Module {
  torch::Tensor first, second;
  MetaPairImpl() {
    const auto options = torch::TensorOptions(torch::kMeta).dtype(torch::kBFloat16);
    first = register_parameter("first", torch::empty({4, 4}, options));
    second = register_parameter("second", torch::empty({4, 4}, options));
  }
  torch::Tensor forward(torch::Tensor x) { return torch::linear(torch::linear(x, first), second); }
};
FSDP_MODULE(MetaPair);

// Meta parameters without a callback: filled through the handles, and one whole weight per rank.
TEST(Cases, MET01_MET02_MetaWeightsFilledThroughTheirHandles) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    MetaPair m;
    shard_one(*m, ctx, mesh, zero3("dp"));
    const auto* group = get_fsdp_module(*m)->parameter_groups()[0];
    EXPECT_THAT(group->main_weight().layout().tensor_to_offset, ElementsAre(0, 16));
    EXPECT_EQ(group->main_weight().layout().size, 32);
    torch::NoGradGuard no_grad;
    double value = 2;
    for (auto& p : m->parameters()) {
      EXPECT_TRUE(p.device().is_cpu());
      EXPECT_EQ(p.scalar_type(), torch::kFloat);
      p.fill_(value++);
    }
    EXPECT_EQ(off_by(m(torch::ones({1, 4}, torch::kBFloat16)), 96.0), 0.0);
  });
}

// A frozen unit keeps no gradients; beside trainable parameters the frozen ones form a group of their own.
TEST(Cases, FRZ01_FRZ02_FrozenParametersHaveNoGradients) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Tiny m;
    fill_by_formula(*m);
    for (auto& p : m->fc1->parameters()) p.set_requires_grad(false);
    m->fc2->bias.set_requires_grad(false);
    shard_tiny(m, ctx, mesh, zero3("dp"));
    const auto frozen = get_fsdp_module(*m->fc1)->parameter_groups();
    ASSERT_EQ(frozen.size(), 1u);
    EXPECT_FALSE(frozen[0]->requires_grad());
    EXPECT_FALSE(frozen[0]->has_main_grad());
    const auto mixed = get_fsdp_module(*m->fc2)->parameter_groups();
    ASSERT_EQ(mixed.size(), 2u);
    EXPECT_THAT(mixed[0]->fqns(), ElementsAre("weight"));
    EXPECT_THAT(mixed[1]->fqns(), ElementsAre("bias"));
    EXPECT_TRUE(mixed[0]->has_main_grad());
    EXPECT_FALSE(mixed[1]->has_main_grad());
    auto loss = m(wave({3, 8}, 1.0)).sum();
    CollectiveLog log(mesh.world());
    loss.backward();
    int64_t reduced = 0;
    for (const auto& r : log.records())
      if (r.operation == "reduce_scatter") reduced += r.elements;
    EXPECT_EQ(reduced, mixed[0]->main_weight().layout().size);
    EXPECT_TRUE(m->fc2->weight.grad().defined());
    EXPECT_FALSE(m->fc2->bias.grad().defined());
    expect_at_rest(*m);
  });
}

}  // namespace
}  // namespace fsdp::testing
