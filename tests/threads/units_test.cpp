/// What units do in forward and backward: tied and frozen weights, reuse, missing gradients, hooks, exceptions, memory.
#include "support/ranks.h"

#include <map>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

struct Layer : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  explicit Layer(bool bias = true) {
    linear = register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(bias)));
  }
};

struct FImpl : Layer {
  torch::Tensor forward(torch::Tensor x) { return torch::tanh(linear(x)); }
};
FSDP_MODULE(F);

/// Trains `make()` unsharded and sharded with the same losses; `loss(model, step, rank)`.
template <class Holder>
void expect_parity(const std::vector<std::vector<int64_t>>& meshes, const std::function<Holder()>& make,
                   const std::function<void(Holder&, FsdpContext&, const DeviceMesh&, const Placements&)>& shard,
                   const std::function<torch::Tensor(Holder&, int64_t, int64_t)>& loss, double tolerance = 1e-6) {
  for (const auto& shape : meshes) {
    int64_t ranks = 1;
    for (auto s : shape) ranks *= s;
    auto reference = make();
    fill_by_formula(*reference);
    torch::optim::SGD sgd(fsdp::parameters(*reference), torch::optim::SGDOptions(0.1));
    std::vector<double> losses;
    for (int64_t s = 0; s < 6; ++s) {
      sgd.zero_grad();
      double total = 0;
      for (int64_t r = 0; r < ranks; ++r) {
        auto l = loss(reference, s, r) / static_cast<double>(ranks);
        l.backward();
        total += l.template item<double>();
      }
      sgd.step();
      losses.push_back(total);
    }
    std::vector<torch::Tensor> weights;
    for (auto& p : fsdp::parameters(*reference)) weights.push_back(p.detach().clone());
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      auto strategies = mesh.ndim() == 1 ? one_axis() : two_axes();
      if (mesh.ndim() == 1)
        for (const auto& s : one_axis())  // and whole tensors on their owners
          if (s.name != "ddp") strategies.push_back({s.name + " by owners", with_kind(s.placements, TensorAtomic{})});
      for (const auto& s : strategies) {
        auto model = make();
        fill_by_formula(*model);
        FsdpContext ctx(mesh.device(), {}, owners_in_turn(*model, mesh.size()));
        shard(model, ctx, mesh, s.placements);
        torch::optim::SGD optimizer(fsdp::parameters(*model), torch::optim::SGDOptions(0.1));
        for (int64_t step = 0; step < 6; ++step) {
          optimizer.zero_grad();
          auto l = loss(model, step, mesh.rank());
          l.backward();
          expect_at_rest(*model);
          optimizer.step();
          EXPECT_NEAR(mean_over_ranks(mesh, l.template item<double>()), losses[static_cast<size_t>(step)], tolerance)
              << s.name << " step " << step;
        }
        const auto got = gathered(*model);
        for (size_t i = 0; i < weights.size(); ++i)
          EXPECT_LT(off_by(got[i] - weights[i], 0.0), tolerance) << s.name << " weight " << i;
      }
    });
  }
}

torch::Tensor x_of(int64_t step, int64_t rank, double phase = 0) {
  return wave({3, 4}, 1.0 + static_cast<double>(step) * 0.6 + static_cast<double>(rank) * 0.3 + phase);
}

// faults B15: one unit used twice in a forward, in a chain and side by side.
TEST(Units, B15_UsedTwice) {
  expect_parity<F>(
      {{1}, {2}, {3}, {2, 2}}, [] { return F(); },
      [](F& m, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& p) { shard_one(*m, ctx, mesh, p); },
      [](F& m, int64_t s, int64_t r) {
        auto x = x_of(s, r);
        return (m(m(x)) + m(x * 0.5) * m(x + 1)).pow(2).mean();
      });
}

struct HeadImpl : torch::nn::Module {
  torch::Tensor weight;
  explicit HeadImpl(const torch::Tensor& table) { weight = register_parameter("weight", table); }
  torch::Tensor forward(torch::Tensor x) { return torch::matmul(x, weight.t()); }
};
TORCH_MODULE(Head);

struct TiedImpl : torch::nn::Module {
  torch::nn::Embedding table{nullptr};
  Head head{nullptr};
  TiedImpl() {
    table = register_module("table", torch::nn::Embedding(10, 4));
    head = register_module("head", Head(table->weight));
  }
  torch::Tensor forward(torch::Tensor ids) { return head(torch::tanh(table(ids))); }
};
FSDP_MODULE(Tied);

torch::Tensor tied_loss(Tied& m, int64_t s, int64_t r) {
  auto ids = (torch::arange(10) * 3 + s + r) % 10;
  return torch::nn::functional::cross_entropy(m(ids), (ids + 1) % 10);
}

// faults B01, behaviours TIE-01, TIE-02: inside a unit, and across units.
TEST(Units, B01_TiedWeights) {
  const std::vector<std::vector<int64_t>> meshes{{1}, {2}, {3}, {4}};
  for (const auto layout : {ShardLayout::kPadded, ShardLayout::kUnpadded}) {
    expect_parity<Tied>(
        meshes, [] { return Tied(); },
        [layout](Tied& m, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& p) {
          shard_one(*m, ctx, mesh, p, {}, 1.0, {}, layout);
          EXPECT_EQ(fsdp::parameters(*m).size(), 1u);
          const auto* group = get_fsdp_module(*m)->parameter_groups()[0];
          EXPECT_THAT(group->aliases(0), ::testing::ElementsAre("table.weight", "head.weight"));
        },
        tied_loss);
    expect_parity<Tied>(
        meshes, [] { return Tied(); },
        [layout](Tied& m, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& p) {
          auto scope = fully_shard_context(ctx);
          fully_shard(m->table, mesh, p, {}, 1.0, {}, layout);
          fully_shard(m, mesh, p, {}, 1.0, {}, layout);
          EXPECT_TRUE(m->head->weight.is_same(m->table->weight));
        },
        tied_loss);
  }
}

struct AdapterImpl : torch::nn::Module {
  torch::nn::Linear base{nullptr}, down{nullptr}, up{nullptr};
  torch::Tensor scale;
  AdapterImpl() {
    base = register_module("base", torch::nn::Linear(4, 4));
    down = register_module("down", torch::nn::Linear(4, 2));
    up = register_module("up", torch::nn::Linear(2, 4));
    scale = register_parameter("scale", torch::ones({}));
    for (auto& p : base->parameters()) p.set_requires_grad(false);
  }
  torch::Tensor forward(torch::Tensor x) { return (base(x) + up(down(x))) * scale; }
};
FSDP_MODULE(Adapter);

struct TwoAdaptersImpl : torch::nn::Module {
  Adapter a{nullptr}, b{nullptr};
  TwoAdaptersImpl() {
    a = register_module("a", Adapter());
    b = register_module("b", Adapter());
  }
  torch::Tensor forward(torch::Tensor x) { return b(torch::tanh(a(x))); }
};
FSDP_MODULE(TwoAdapters);

// faults B38, B02; behaviours FRZ: frozen and trainable weights in one unit, a 0-dim weight, no extra gather for
// either.
TEST(Units, B38_FrozenBesideTrainable) {
  expect_parity<TwoAdapters>(
      {{1}, {2}, {3}, {2, 2}}, [] { return TwoAdapters(); },
      [](TwoAdapters& m, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& p) {
        auto scope = fully_shard_context(ctx);
        fully_shard(m->a, mesh, p);
        fully_shard(m->b, mesh, p);
        fully_shard(m, mesh, p);
      },
      [](TwoAdapters& m, int64_t s, int64_t r) { return m(x_of(s, r)).pow(2).mean(); });
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    TwoAdapters m;
    fill_by_formula(*m);
    const auto before = m->a->base->weight.detach().clone();
    {
      auto scope = fully_shard_context(ctx);
      fully_shard(m->a, mesh, zero3("dp"));
      fully_shard(m->b, mesh, zero3("dp"));
    }
    CollectiveLog log(mesh.world());
    m(x_of(0, mesh.rank())).sum().backward();
    std::map<std::string, int> count;
    for (const auto& r : log.records()) ++count[r.operation];
    // b: two groups in forward and backward. a: its frozen weights get no gradient through it, but it is gathered
    // whole.
    EXPECT_EQ(count["all_gather"], 8);
    EXPECT_EQ(count["reduce_scatter"], 2);
    EXPECT_FALSE(m->a->base->weight.grad().defined());
    EXPECT_TRUE(torch::equal(gathered(*m)[1], before) || torch::equal(gathered(*m)[0], before));
  });
}

// behaviours FRZ-04, FSH-52: a frozen unit with and without a gradient to pass on.
TEST(Units, FrozenUnits) {
  for (bool input_needs_grad : {false, true})
    expect_parity<torch::nn::Sequential>(
        {{2}}, [] { return torch::nn::Sequential(F(), F()); },
        [&](torch::nn::Sequential& m, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& p) {
          for (auto& w : m->children()[input_needs_grad ? 1 : 0]->parameters()) w.set_requires_grad(false);
          auto scope = fully_shard_context(ctx);
          for (auto& child : m->children()) fully_shard(*child, mesh, p);
        },
        [&](torch::nn::Sequential& m, int64_t s, int64_t r) {
          for (auto& w : m->children()[input_needs_grad ? 1 : 0]->parameters())
            if (w.requires_grad()) w.set_requires_grad(false);
          return m->forward(x_of(s, r)).pow(2).mean();
        });
}

// faults B16: two forwards before two backwards, and a backward twice over a kept graph.
TEST(Units, B16_ForwardsAndBackwardsInAnyOrder) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      Probe probe(4, 3);
      shard_one(*probe, ctx, mesh, s.placements);
      auto one = probe->forward(1.0), two = probe->forward(2.0);
      one.backward();
      two.backward();
      EXPECT_EQ(off_by(probe->weight.grad(), 3.0), 0.0) << s.name;
      probe->zero_grad();
      auto kept = probe->forward(1.0);
      kept.backward({}, /*retain_graph=*/true);
      kept.backward();
      EXPECT_EQ(off_by(probe->weight.grad(), 2.0), 0.0) << s.name;
      expect_at_rest(*probe);
      FsdpContext other(mesh.device());
      F f;
      fill_by_formula(*f);
      auto x = x_of(0, mesh.rank());
      auto expected = f(x).detach();
      shard_one(*f, other, mesh, s.placements);
      auto y = f(x), z = f(x);
      EXPECT_TRUE(torch::allclose(y, expected, 1e-6, 1e-6));
      z.sum().backward();
      y.sum().backward();
    }
  });
}

struct BranchesImpl : torch::nn::Module {
  F a{nullptr}, b{nullptr};
  BranchesImpl() {
    a = register_module("a", F());
    b = register_module("b", F());
  }
  torch::Tensor forward(torch::Tensor x, bool use_b, bool detach_b) {
    auto y = a(x);
    if (use_b) y = y + (detach_b ? b(x).detach() : b(x));
    return y;
  }
};
FSDP_MODULE(Branches);

// behaviours FSH-53, spec "Missing gradients".
TEST(Units, MissingGradients) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      Branches m;
      fill_by_formula(*m);
      {
        auto scope = fully_shard_context(ctx);
        fully_shard(m->a, mesh, s.placements);
        fully_shard(m->b, mesh, s.placements);
        fully_shard(m, mesh, s.placements);
      }
      auto& weight = m->b->linear->weight;
      auto x = x_of(0, mesh.rank());
      m(x, false, false).sum().backward();  // no rank runs b
      EXPECT_FALSE(weight.grad().defined()) << s.name;
      expect_at_rest(*m);
      m->zero_grad();
      // Only rank 0's loss depends on b: the other rank's contribution counts as zero... and both must agree that b
      // ran.
      m(x, true, false).sum().backward();
      EXPECT_TRUE(weight.grad().defined()) << s.name;
      const auto kept = weight.grad().clone();
      m(x, true, true).sum().backward();  // b ran forward and got no gradient
      EXPECT_TRUE(torch::equal(weight.grad(), kept)) << s.name;
      expect_at_rest(*m);
      m(x, true, false).sum().backward();
      EXPECT_TRUE(torch::allclose(weight.grad(), kept * 2)) << s.name;
    }
  });
}

// faults B37 (a): a weight whose first gradient comes in the last microbatch.
struct LateImpl : torch::nn::Module {
  torch::Tensor first, second;
  LateImpl() {
    first = register_parameter("first", torch::ones({3, 2}));
    second = register_parameter("second", torch::ones({3, 2}));
  }
  torch::Tensor forward(double a, double b) {
    return b == 0 ? (first * a).sum() : (first * a).sum() + (second * b).sum();
  }
};
FSDP_MODULE(Late);

TEST(Units, B37_GradientInTheLastMicrobatchOnly) {
  for (auto shape : std::vector<std::vector<int64_t>>{{1}, {2}})
    on_mesh(shape, [](const DeviceMesh& mesh) {
      for (const auto& s : one_axis()) {
        FsdpContext ctx(mesh.device());
        Late m;
        shard_one(*m, ctx, mesh, s.placements, {.main_grads_dtype = at::kFloat, .param_dtype = at::kBFloat16});
        for (int k = 0; k < 3; ++k) {
          auto scope = microbatch(ctx, k == 2);
          m(1.0, k == 2 ? 0.5 : 0.0).backward();
        }
        EXPECT_EQ(off_by(m->first.grad(), 3.0), 0.0) << s.name;
        EXPECT_EQ(off_by(m->second.grad(), 0.5), 0.0) << s.name;
        EXPECT_EQ(m->second.grad().scalar_type(), at::kFloat);
      }
    });
}

struct Pair {
  torch::Tensor first;
  std::vector<torch::Tensor> rest;
};

struct RichImpl : Layer {
  std::tuple<torch::Tensor, std::optional<torch::Tensor>, std::map<std::string, Pair>> forward(
      torch::Tensor a, const torch::Tensor& b, std::optional<torch::Tensor> c, int64_t times) {
    std::map<std::string, Pair> m;
    m["only"] = {linear(a) * static_cast<double>(times), {linear(b)}};
    return {a.detach(), c ? std::optional(linear(*c)) : std::nullopt, m};
  }
  torch::Tensor encode(torch::Tensor x) { return torch::tanh(linear(x)); }
};

}  // namespace
}  // namespace fsdp::testing

template <>
struct fsdp::Tensors<fsdp::testing::Pair> {
  template <class F>
  static void visit(fsdp::testing::Pair& p, F&& f) {
    fsdp::visit_tensors(f, p.first, p.rest);
  }
};

namespace fsdp::testing {
namespace {

FSDP_MODULE(Rich);

// faults B18: any arguments, any outputs, other methods.
TEST(Units, B18_EntryPoints) {
  for (int kind = 0; kind < 4; ++kind)
    expect_parity<Rich>(
        {{2}}, [] { return Rich(); },
        [](Rich& m, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& p) { shard_one(*m, ctx, mesh, p); },
        [kind](Rich& m, int64_t s, int64_t r) {
          auto x = x_of(s, r);
          if (kind == 3) return m->encode(x).pow(2).mean();
          auto [a, c, map] = kind == 0 ? m(x, x * 2, x * 3, 2) : m->forward(x, x * 2, std::nullopt, 3);
          if (kind == 0) return (*c).pow(2).mean();
          return kind == 1 ? map["only"].first.pow(2).mean() : map["only"].rest[0].pow(2).mean();
        });
}

// faults B19: optimizers built before sharding, and after a forward.
TEST(Units, B19_OptimizersBuiltAtAnyTime) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (bool early : {true, false}) {
      FsdpContext ctx(mesh.device());
      Probe probe(8, 1);
      std::optional<torch::optim::SGD> sgd;
      if (early) sgd.emplace(fsdp::parameters(*probe), 0.1);
      shard_one(*probe, ctx, mesh, zero3("dp"));
      {
        torch::NoGradGuard no_grad;
        probe->forward(1.0);
      }
      if (!early) sgd.emplace(fsdp::parameters(*probe), 0.1);
      probe->forward(1.0).backward();
      sgd->step();
      EXPECT_LT(off_by(gathered(*probe)[0], 0.9), 1e-7);
    }
  });
}

struct OddImpl : torch::nn::Module {
  torch::Tensor scalar, transposed, empty, wide;
  OddImpl() {
    scalar = register_parameter("scalar", torch::ones({}));
    transposed = register_parameter("transposed", torch::ones({6, 4}).t().set_requires_grad(true).detach());
    empty = register_parameter("empty", torch::ones({3, 0}));
    wide = register_parameter("wide", torch::ones({2, 3, 4, 5}).to(torch::MemoryFormat::ChannelsLast));
  }
  torch::Tensor forward(torch::Tensor x) {
    EXPECT_EQ(empty.sizes(), (std::vector<int64_t>{3, 0}));
    EXPECT_TRUE(wide.is_contiguous(torch::MemoryFormat::ChannelsLast));
    return torch::tanh(torch::matmul(x, transposed)).sum() * scalar + torch::sin(wide).sum() * x.sum() + empty.sum();
  }
};
FSDP_MODULE(Odd);

// faults B40: 0-dim, transposed, empty and channels-last weights.
TEST(Units, B40_OddParameters) {
  for (const auto layout : {ShardLayout::kPadded, ShardLayout::kUnpadded})
    expect_parity<Odd>(
        {{1}, {2}, {3}}, [] { return Odd(); },
        [layout](Odd& m, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& p) {
          shard_one(*m, ctx, mesh, p, {}, 1.0, {}, layout);
        },
        [](Odd& m, int64_t s, int64_t r) { return m(x_of(s, r) * 0.1) * 0.1; }, 1e-5);
}

// A weight tied across units, used by operators outside any forward: it is at rest after backward like all others.
TEST(Units, TiedAcrossUnitsByOperators) {
  struct Inner : torch::nn::Module {
    Inner() { register_parameter("own", torch::ones({4, 3})); }
  };
  struct Outer : torch::nn::Module {
    std::shared_ptr<Inner> inner;
    Outer() {
      inner = register_module("inner", std::make_shared<Inner>());
      register_parameter("tied", inner->named_parameters()["own"]);
      register_parameter("lone", torch::ones({4}));
    }
  };
  auto loss_of = [](Outer& m) {
    auto loss = torch::zeros({});
    for (auto& p : fsdp::parameters(m)) loss = loss + (p * 1.3).sin().sum();
    return loss;
  };
  Outer reference;
  torch::optim::SGD reference_sgd(fsdp::parameters(reference), 0.1);
  std::vector<double> expected;
  for (int64_t step = 0; step < 6; ++step) {
    reference_sgd.zero_grad();
    auto loss = loss_of(reference);
    loss.backward();
    reference_sgd.step();
    expected.push_back(loss.item<double>());
  }
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      auto model = std::make_shared<Outer>();
      {
        auto scope = fully_shard_context(ctx);
        fully_shard(*model->inner, mesh, s.placements);
        fully_shard(*model, mesh, s.placements);
      }
      torch::optim::SGD optimizer(fsdp::parameters(*model), 0.1);
      for (int64_t step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        auto loss = loss_of(*model);
        loss.backward();
        expect_at_rest(*model);
        optimizer.step();
        EXPECT_NEAR(loss.item<double>(), expected[static_cast<size_t>(step)], 1e-6) << s.name;
      }
    }
  });
}

// A parameter that LibTorch itself registers as frozen has no autograd state of its own.
TEST(Units, FrozenAtRegistration) {
  struct Scaled : torch::nn::Module {
    torch::Tensor weight, scale;
    Scaled() {
      weight = register_parameter("weight", torch::ones({4, 4}));
      scale = register_parameter("scale", torch::full({4}, 2.0), /*requires_grad=*/false);
    }
    torch::Tensor forward(torch::Tensor x) { return torch::matmul(x, weight) * scale; }
  };
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    auto model = std::make_shared<Scaled>();
    shard_one(*model, ctx, mesh, zero3("dp"));
    model->forward(torch::ones({2, 4})).sum().backward();
    EXPECT_EQ(off_by(model->weight.grad(), 4.0), 0.0);
    EXPECT_FALSE(model->scale.grad().defined());
  });
}

struct ThrowsImpl : Layer {
  bool broken = false;
  torch::Tensor forward(torch::Tensor x) {
    auto y = linear(x);
    if (broken) throw std::logic_error("user code");
    return y;
  }
};
FSDP_MODULE(Throws);

// behaviours FSH-56: exceptions in forward and in backward, on all ranks; the next step works.
TEST(Units, ExceptionsLeaveEverythingAtRest) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      torch::nn::Sequential m{Throws(), F()};
      fill_by_formula(*m);
      {
        auto scope = fully_shard_context(ctx);
        for (auto& child : m->children()) fully_shard(*child, mesh, s.placements);
      }
      auto& first = *m->children()[0]->as<Throws>();
      auto x = x_of(0, mesh.rank());
      m->forward(x).sum().backward();
      const auto kept = first.linear->weight.grad().clone();
      first.broken = true;
      EXPECT_EQ(thrown<std::logic_error>([&] { m->forward(x); }), "user code");
      expect_at_rest(*m);
      first.broken = false;
      auto y = m->forward(x);
      y.register_hook([](torch::Tensor) -> torch::Tensor { throw std::logic_error("in backward"); });
      EXPECT_ANY_THROW(y.sum().backward());
      expect_at_rest(*m);
      EXPECT_TRUE(torch::equal(first.linear->weight.grad(), kept)) << s.name;
      auto h = first.forward(x);
      h.register_hook([](torch::Tensor) -> torch::Tensor { throw std::logic_error("in backward"); });
      EXPECT_ANY_THROW(m->children()[1]->as<F>()->forward(h).sum().backward());
      expect_at_rest(*m);
      EXPECT_TRUE(torch::equal(first.linear->weight.grad(), kept)) << s.name;
      m->zero_grad();
      m->forward(x).sum().backward();
      EXPECT_TRUE(torch::allclose(first.linear->weight.grad(), kept)) << s.name;
    }
  });
}

// spec "Hooks": an unmodified library module, no module hooks anywhere.
TEST(Units, OperatorHooksOnTransformerEncoder) {
  using namespace torch::nn;
  expect_parity<TransformerEncoder>(
      {{1}, {2}, {3}},
      [] {
        return TransformerEncoder(
            TransformerEncoderOptions(TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.0), 3));
      },
      [](TransformerEncoder& m, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& p) {
        auto scope = fully_shard_context(ctx);
        for (auto& layer : *m->layers) fully_shard(*layer, mesh, p);
        fully_shard(m, mesh, p);
      },
      [](TransformerEncoder& m, int64_t s, int64_t r) {
        return m(wave({5, 2, 8}, static_cast<double>(s) + static_cast<double>(r))).pow(3).mean().square();
      });
}

// spec "Reading at rest".
TEST(Units, ReadingAtRest) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    torch::nn::Linear m(4, 4);
    fill_by_formula(*m);
    auto x = torch::ones({1, 4});
    const auto expected = m(x).detach();
    shard_one(*m, ctx, mesh, zero3("dp"));
    torch::NoGradGuard no_grad;
    EXPECT_LT(m->weight.sum().numel(), 2);
    EXPECT_EQ(m->weight.size(0) * 4, m->weight.numel());
    EXPECT_THAT(thrown<StateError>([&] { m(x); }), HasSubstr("forward_scope"));
    {
      auto scope = forward_scope(ctx);
      EXPECT_TRUE(torch::allclose(m(x), expected));
    }
    m->eval();
    EXPECT_TRUE(torch::allclose(m(x), expected));
    FullParameters full(*m);
    EXPECT_EQ(m->weight.size(0), 4);
  });
}

// behaviours FSH-41, OVL-07, OVL-08; faults B34: collectives of a step, counted and in order.
TEST(Units, B34_CollectivesOfAStep) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    struct Expected {
      int gathers, scatters, reduces;
    };
    for (int64_t micro : {1, 3}) {
      const int m = static_cast<int>(micro);
      const std::map<std::string, Expected> expected{
          {"ddp", {0, 0, 3}}, {"zero1", {3, 3, 0}}, {"zero2", {3, 3 * m, 0}}, {"zero3", {6 * m, 3 * m, 0}}};
      for (const auto& s : one_axis()) {
        FsdpContext ctx(mesh.device());
        auto model = make_mlp(2);
        shard_mlp(*model, ctx, mesh, s.placements);
        torch::optim::SGD sgd(fsdp::parameters(*model), 0.1);
        for (int step = 0; step < 2; ++step) {
          CollectiveLog log(mesh.world());
          sgd.zero_grad();
          for (int64_t k = 0; k < micro; ++k) {
            auto scope = microbatch(ctx, k == micro - 1);
            mlp_loss(*model, input_of(0, k, 0), target_of(0, k, 0)).backward();
          }
          std::map<std::string, int> count;
          for (const auto& r : log.records()) ++count[r.operation];
          const auto& e = expected.at(s.name);
          // The first forward of all finds initial weights that are gathered like any others.
          EXPECT_EQ(count["all_gather"], e.gathers) << s.name;
          EXPECT_EQ(count["reduce_scatter"], e.scatters) << s.name;
          EXPECT_EQ(count["all_reduce"], e.reduces) << s.name;
          {
            torch::NoGradGuard no_grad;
            log.clear();
            model->forward(input_of(0, 0, 0));
            EXPECT_EQ(log.records().size(), s.name == "zero3" ? 3u : 0u) << s.name;
          }
          sgd.step();
        }
      }
    }
    // The normative trace: units in order, one unit ahead.
    FsdpContext ctx(mesh.device());
    auto model = make_mlp(2);
    shard_mlp(*model, ctx, mesh, zero3("dp"));
    CollectiveLog log(mesh.world());
    mlp_loss(*model, input_of(0, 0, 0), target_of(0, 0, 0)).backward();
    std::vector<std::string> trace;
    for (const auto& r : log.records()) trace.push_back((r.operation == "all_gather" ? "G " : "R ") + r.unit);
    EXPECT_THAT(trace, ::testing::ElementsAre("G ", "G blocks.0", "G blocks.1", "G ", "G blocks.1", "G blocks.0",
                                              "R blocks.1", "R blocks.0", "R "));
  });
  on_mesh({1}, [](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      auto model = make_mlp(2);
      shard_mlp(*model, ctx, mesh, s.placements);
      CollectiveLog log(mesh.world());
      mlp_loss(*model, input_of(0, 0, 0), target_of(0, 0, 0)).backward();
      EXPECT_TRUE(log.records().empty()) << s.name;
    }
  });
}

// behaviours HSD-03 to HSD-05.
TEST(Units, CollectivesOfHybridStrategies) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (const auto& s : two_axes()) {
      FsdpContext ctx(mesh.device());
      auto model = make_mlp(2);
      shard_mlp(*model, ctx, mesh, s.placements);
      torch::optim::SGD sgd(fsdp::parameters(*model), 0.1);
      for (int step = 0; step < 2; ++step) {
        CollectiveLog log(mesh.world());
        sgd.zero_grad();
        for (int64_t k = 0; k < 3; ++k) {
          auto scope = microbatch(ctx, k == 2);
          mlp_loss(*model, input_of(0, k, 0), target_of(0, k, 0)).backward();
        }
        sgd.step();
        std::map<std::string, int> count;
        for (const auto& r : log.records()) ++count[r.axes + " " + r.operation];
        EXPECT_EQ(count["inner all_gather"], 18) << s.name;
        EXPECT_EQ(count["inner reduce_scatter"], 9) << s.name;
        EXPECT_EQ(count["outer all_reduce"], s.name == "hsdp" ? 3 : 0) << s.name;
        EXPECT_EQ(count["outer reduce_scatter"], s.name == "hsdp" ? 0 : 3) << s.name;
        EXPECT_EQ(count["outer all_gather"], s.name == "hsdp" ? 0 : 3) << s.name;
      }
    }
  });
}

// spec "Persistent bytes": exactly the formula, with padding as the layout states it.
TEST(Units, PersistentBytes) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (bool bf16 : {false, true})
      for (const auto& s : one_axis()) {
        FsdpContext ctx(mesh.device());
        auto model = make_mlp(2);
        shard_mlp(*model, ctx, mesh, s.placements,
                  {.main_grads_dtype = at::kFloat, .param_dtype = bf16 ? at::kBFloat16 : at::kFloat});
        for (auto* unit : ctx.forward_order())
          for (const auto* g : unit->parameter_groups()) {
            const int64_t n = g->main_weight().layout().size, w = mesh.size(), item = bf16 ? 2 : 4;
            const int64_t main = s.name == "ddp" ? n : n / w, model_weight = s.name == "zero3" ? n / w : n;
            // fp32: one memory for both, the larger of them.
            EXPECT_EQ(g->persistent_bytes(), (bf16 ? main * 4 + model_weight * item : model_weight * 4) + main * 4)
                << s.name;
            EXPECT_EQ(g->full_bytes(), 0);
          }
      }
  });
}

// behaviours MET: meta parameters, initialised by a callback that sees whole tensors, the same on every world size.
struct MetaLinear : torch::nn::Module {
  torch::Tensor weight, bias;
  MetaLinear() {
    weight = register_parameter("weight", torch::empty({7, 5}, torch::kMeta));
    bias = register_parameter("bias", torch::empty({7}, torch::kMeta));
  }
};

TEST(Units, MetaInitialisation) {
  for (int64_t ranks : {1, 2, 3})
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      FsdpContext ctx(mesh.device());
      auto m = std::make_shared<MetaLinear>();
      auto init = [](const std::string& fqn, torch::Tensor full) {
        full.copy_(wave(full.sizes().vec(), fqn == "bias" ? 1.0 : 2.0));
      };
      {
        auto scope = fully_shard_context(ctx);
        fully_shard(*m, mesh, zero3("dp"), {}, 1.0, {}, ShardLayout::kPadded, init);
      }
      EXPECT_TRUE(m->weight.device().is_cpu());
      const auto got = gathered(*m);
      EXPECT_TRUE(torch::equal(got[0], wave({7, 5}, 2.0)));
      EXPECT_TRUE(torch::equal(got[1], wave({7}, 1.0)));
      torch::linear(torch::ones({1, 5}), m->weight, m->bias).sum().backward();
      EXPECT_TRUE(m->weight.grad().defined());
    });
}

// spec "FullParameters": write-back is local and exact.
TEST(Units, FullParametersWriteBack) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      auto model = make_mlp(2);
      shard_mlp(*model, ctx, mesh, s.placements);
      for (bool keep : {true, false}) {
        torch::NoGradGuard no_grad;
        FullParameters full(*model, keep);
        CollectiveLog log(mesh.world());
        double k = 0;
        for (auto& p : fsdp::parameters(*model)) p.copy_(wave(p.sizes().vec(), keep ? ++k : -1.0));
        EXPECT_TRUE(log.records().empty());
      }
      double k = 0;
      for (auto& p : gathered(*model)) EXPECT_TRUE(torch::equal(p, wave(p.sizes().vec(), ++k))) << s.name;
    }
  });
}

// spec: deleting the model frees everything at once; handles that the optimizer kept do not hold units.
TEST(Units, DeletionFreesEverything) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    std::weak_ptr<FsdpModule> unit;
    std::weak_ptr<detail::ContextState> state = ctx.state();
    {
      auto model = make_mlp(2);
      shard_mlp(*model, ctx, mesh, zero3("dp"));
      auto loss = mlp_loss(*model, input_of(0, 0, 0), target_of(0, 0, 0));
      unit = static_cast<detail::HookSlot&>(*model).unit();
      EXPECT_EQ(ctx.forward_order().size(), 3u);
      loss.backward();
    }
    EXPECT_TRUE(unit.expired());
    EXPECT_TRUE(ctx.forward_order().empty());
    { FsdpContext moved(std::move(ctx)); }
    EXPECT_TRUE(state.expired());
    // An unmodified module: its parameters own the unit.
    FsdpContext other(mesh.device());
    {
      torch::nn::Linear linear(4, 4);
      fill_by_formula(*linear);
      shard_one(*linear, other, mesh, zero3("dp"));
      linear(torch::ones({1, 4})).sum().backward();
      EXPECT_EQ(other.forward_order().size(), 1u);
    }
    EXPECT_TRUE(other.forward_order().empty());
  });
}

}  // namespace
}  // namespace fsdp::testing
