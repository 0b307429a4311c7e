/// Every triple of placements on every mesh: it trains like the unsharded model, or fully_shard refuses it.
#include <map>

#include "support/ranks.h"

namespace fsdp::testing {
namespace {

struct TinyImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr};
  TinyImpl() {
    a = register_module("a", torch::nn::Linear(3, 5));
    b = register_module("b", torch::nn::Linear(5, 2));
    fill_by_formula(*this);
  }
  torch::Tensor forward(torch::Tensor x) { return b(torch::tanh(a(x))); }
};
FSDP_MODULE(Tiny);

torch::Tensor loss_of(Tiny& m, int64_t step, int64_t micro, int64_t rank) {
  const double seed =
      1 + 0.7 * static_cast<double>(step) + 0.3 * static_cast<double>(micro) + 0.1 * static_cast<double>(rank);
  return torch::mse_loss(m(wave({2, 3}, seed)), wave({2, 2}, 2 * seed));
}

std::vector<std::vector<Placement>> sequences(size_t axes, bool with_partial) {
  std::vector<std::vector<Placement>> all{{}};
  for (size_t i = 0; i < axes; ++i) {
    std::vector<std::vector<Placement>> next;
    for (const auto& s : all)
      for (const auto& p : std::vector<Placement>{Replicate{}, Shard{0}, Partial{}}) {
        if (is_partial(p) && !with_partial) continue;
        next.push_back(s);
        next.back().push_back(p);
      }
    all = std::move(next);
  }
  return all;
}

bool suffix_rule(const std::vector<Placement>& s) {
  bool sharded = false;
  for (const auto& p : s) {
    if (sharded && !is_sharded(p)) return false;
    sharded = sharded || is_sharded(p);
  }
  return true;
}

std::string name_of(const Placements& p) {
  return to_string(std::span(p.parameter)) + to_string(std::span(p.gradient)) + to_string(std::span(p.optimizer));
}

class Matrix : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(Matrix, TrainsOrRefuses) {
  const auto shape = GetParam();
  int64_t ranks = 1;
  for (auto s : shape) ranks *= s;
  std::vector<MeshAxis> axes;
  for (size_t i = 0; i < shape.size(); ++i) axes.emplace_back(static_cast<int64_t>(i));
  std::map<std::pair<int64_t, bool>, fsdp::testing::Run> references;
  for (int64_t micro : {1, 3})
    for (bool none : {true, false}) {
      fsdp::testing::Run run;
      Tiny m;
      torch::optim::SGD sgd(m->parameters(), torch::optim::SGDOptions(0.1));
      for (int64_t s = 0; s < 6; ++s) {
        sgd.zero_grad(none);
        double total = 0;
        for (int64_t k = 0; k < micro; ++k)
          for (int64_t r = 0; r < ranks; ++r) {
            auto l = loss_of(m, s, k, r) / static_cast<double>(micro * ranks);
            l.backward();
            total += l.item<double>();
          }
        sgd.step();
        run.losses.push_back(total);
      }
      for (auto& p : m->parameters()) run.weights.push_back(p.detach().clone());
      references[{micro, none}] = run;
    }
  on_mesh(
      shape,
      [&](const DeviceMesh& mesh) {
        for (const auto& parameter : sequences(shape.size(), false))
          for (const auto& gradient : sequences(shape.size(), true))
            for (const auto& optimizer : sequences(shape.size(), false)) {
              const Placements p{axes, parameter, gradient, optimizer};
              const bool valid = suffix_rule(parameter) && suffix_rule(gradient) && suffix_rule(optimizer);
              int variant = 0;
              for (const auto& [key, reference] : references) {
                // Larger meshes take one variant per triple, in turn, so that all are covered in bounded time.
                if (mesh.ndim() == 3 && variant++ != static_cast<int>(name_of(p).size() % 4)) continue;
                FsdpContext ctx(mesh.device());
                Tiny m;
                try {
                  auto scope = fully_shard_context(ctx);
                  fully_shard(m->a, mesh, p);
                  fully_shard(m, mesh, p);
                } catch (const ValueError&) {
                  EXPECT_FALSE(valid) << name_of(p) << " was refused";
                  break;
                }
                EXPECT_TRUE(valid) << name_of(p) << " was not refused";
                torch::optim::SGD sgd(fsdp::parameters(*m), torch::optim::SGDOptions(0.1));
                fsdp::testing::Run run;
                for (int64_t s = 0; s < 6; ++s) {
                  sgd.zero_grad(key.second);
                  double total = 0;
                  for (int64_t k = 0; k < key.first; ++k) {
                    auto mb = microbatch(ctx, k == key.first - 1);
                    auto l = loss_of(m, s, k, mesh.rank()) / static_cast<double>(key.first);
                    l.backward();
                    total += l.item<double>();
                  }
                  sgd.step();
                  run.losses.push_back(mean_over_ranks(mesh, total));
                }
                run.weights = gathered(*m);
                EXPECT_LT(difference(reference, run), 1e-6)
                    << name_of(p) << " microbatches " << key.first << " set_to_none " << key.second;
              }
            }
      },
      60'000);
}

INSTANTIATE_TEST_SUITE_P(Meshes, Matrix,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{3}, std::vector<int64_t>{4},
                                           std::vector<int64_t>{2, 2}, std::vector<int64_t>{4, 1},
                                           std::vector<int64_t>{1, 4}, std::vector<int64_t>{2, 2, 2}));

}  // namespace
}  // namespace fsdp::testing
