/// fully_shard in FSDP2's spelling.
#include "support/ranks.h"

#include <map>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

TEST(Compat, TrainsWithoutAContext) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {2, 2}}) {
    int64_t ranks = 1;
    for (auto s : shape) ranks *= s;
    const auto reference = reference_run(ranks, 2, 6, 3);
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (auto reshard : {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
        auto model = make_mlp(2);
        for (auto& b : *model->blocks) compat::fully_shard(*b, {.mesh = mesh, .reshard_after_forward = reshard});
        auto& root = compat::fully_shard(*model, {.mesh = mesh, .reshard_after_forward = reshard});
        torch::optim::SGD optimizer(fsdp::parameters(*model), torch::optim::SGDOptions(0.1).momentum(0.9));
        fsdp::testing::Run run;
        for (int64_t s = 0; s < 6; ++s) {
          optimizer.zero_grad();
          double total = 0;
          for (int64_t m = 0; m < 3; ++m) {
            CollectiveLog log(mesh.world());
            auto scope = microbatch(root.context(), m == 2);
            auto loss = mlp_loss(*model, input_of(s, m, mesh.rank()), target_of(s, m, mesh.rank())) / 3.0;
            loss.backward();
            total += loss.item<double>();
            std::map<std::string, int> gathers;
            for (const auto& r : log.records()) gathers[r.unit] += r.operation == "all_gather";
            if (mesh.size() == 1) continue;
            EXPECT_EQ(gathers["blocks.0"], reshard.value_or(true) ? 2 : 1);
            EXPECT_EQ(gathers[""], reshard.value_or(false) ? 2 : 1) << "the root keeps its weights by default";
          }
          expect_at_rest(*model);
          optimizer.step();
          run.losses.push_back(mean_over_ranks(mesh, total));
        }
        run.weights = gathered(*model);
        EXPECT_LT(difference(reference, run), 1e-6);
      }
    });
  }
}

struct CastsImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  std::vector<torch::ScalarType> seen;
  CastsImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& y, std::optional<torch::Tensor> z,
                        std::vector<torch::Tensor> list, torch::Tensor ids) {
    seen = {x.scalar_type(), y.scalar_type(), z->scalar_type(), list.at(0).scalar_type(), ids.scalar_type()};
    return linear(x + y + *z + list[0]);
  }
};
FSDP_MODULE(Casts);

TEST(Compat, MixedPrecisionPolicy) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    using Types = std::vector<torch::ScalarType>;
    Casts m;
    fill_by_formula(*m);
    compat::fully_shard(
        m, {.mesh = mesh,
            .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = at::kDouble}});
    auto x = torch::ones({2, 4}, torch::requires_grad());
    auto y = m(x, x, std::optional<torch::Tensor>(x), std::vector<torch::Tensor>{x}, torch::ones({1}, torch::kLong));
    EXPECT_EQ(y.scalar_type(), torch::kDouble);
    EXPECT_EQ(m->seen, Types({at::kBFloat16, at::kBFloat16, at::kBFloat16, at::kBFloat16, at::kLong}));
    y.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), torch::kFloat);
    const auto* group = get_fsdp_module(*m)->parameter_groups()[0];
    EXPECT_EQ(group->dtype(), torch::kBFloat16);
    EXPECT_EQ(group->main_weight().dtype(), torch::kFloat);
    // Sharded parameters keep their dtype, and so do the optimizer's gradients: a plain torch::optim steps them.
    EXPECT_EQ(m->linear->weight.scalar_type(), torch::kFloat);
    EXPECT_EQ(m->linear->weight.grad().scalar_type(), torch::kFloat);
    torch::optim::AdamW(fsdp::parameters(*m), 0.1).step();

    Casts as_given;
    fill_by_formula(*as_given);
    compat::fully_shard(as_given,
                        {.mesh = mesh, .mp_policy = {.param_dtype = at::kFloat, .cast_forward_inputs = false}});
    auto d = torch::ones({2, 4}, torch::kBFloat16).to(torch::kFloat);
    as_given(d, d, std::optional<torch::Tensor>(d), std::vector<torch::Tensor>{d.to(at::kDouble).to(at::kFloat)},
             torch::ones({1}, torch::kDouble));
    EXPECT_EQ(as_given->seen.back(), torch::kDouble);
  });
}

TEST(Compat, IgnoredParametersAreLeftAlone) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto model = make_mlp(2);
    auto weight = model->head->weight;
    compat::fully_shard(*model, {.mesh = mesh, .ignored_params = {weight}});
    EXPECT_EQ(weight.size(0), 3);
    CollectiveLog log(mesh.world());
    mlp_loss(*model, input_of(0, 0, mesh.rank()), target_of(0, 0, mesh.rank())).backward();
    EXPECT_EQ(weight.grad().size(0), 3);
    const auto names = get_fsdp_module(*model)->parameter_groups()[0]->fqns();
    EXPECT_EQ(std::count(names.begin(), names.end(), "head.weight"), 0);
    EXPECT_EQ(std::count(names.begin(), names.end(), "head.bias"), 1);
    // The gradient is this rank's own.
    auto alone = make_mlp(2);
    mlp_loss(*alone, input_of(0, 0, mesh.rank()), target_of(0, 0, mesh.rank())).backward();
    EXPECT_TRUE(torch::allclose(weight.grad(), alone->head->weight.grad()));
  });
}

TEST(Compat, Misuse) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    torch::nn::Linear linear(4, 4);
    fill_by_formula(*linear);
    EXPECT_THAT(thrown<ValueError>(
                    [&] { compat::fully_shard(linear, {.mesh = mesh, .mp_policy = {.param_dtype = at::kBFloat16}}); }),
                HasSubstr("cast_forward_inputs"));
    EXPECT_THAT(
        thrown<ValueError>([&] { compat::fully_shard(linear, {.mesh = mesh, .ignored_params = {torch::ones({2})}}); }),
        HasSubstr("ignored_params[0]"));
    EXPECT_THAT(thrown<ValueError>([&] { compat::fully_shard(linear, {.mesh = mesh.sub({})}); }), HasSubstr("mesh"));
    EXPECT_EQ(get_fsdp_module(*linear), nullptr);
    compat::fully_shard(linear,
                        {.mesh = mesh, .mp_policy = {.param_dtype = at::kBFloat16, .cast_forward_inputs = false}});
    EXPECT_EQ(linear(torch::ones({1, 4}, torch::kBFloat16)).scalar_type(), torch::kBFloat16);
    // Joins a context that is active.
    FsdpContext ctx(mesh.device());
    torch::nn::Linear other(4, 4);
    fill_by_formula(*other);
    fully_shard_context(ctx, [&] { compat::fully_shard(other, {.mesh = mesh}); });
    EXPECT_EQ(ctx.forward_order().size(), 1u);
  });
}

}  // namespace
}  // namespace fsdp::testing
