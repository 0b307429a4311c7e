/// Contexts, ownership, grouping, and everything that is refused.
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct NestedImpl : torch::nn::Module {
  torch::Tensor bias;
  torch::nn::Linear inner{nullptr};
  NestedImpl() {
    bias = register_parameter("bias", torch::ones({4}));
    inner = register_module("inner", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    fill_by_formula(*this);
  }
  torch::Tensor forward(torch::Tensor x) { return inner(x) + bias; }
  void replace() { bias = parameters_["bias"] = torch::zeros({4}, torch::requires_grad()); }
};
FSDP_MODULE(Nested);

std::vector<std::string> names(const std::vector<FsdpModule*>& units) {
  std::vector<std::string> result;
  for (auto* u : units) result.push_back(u->name());
  return result;
}

struct SiblingImpl : torch::nn::Module {
  Nested left{nullptr};
  torch::nn::Linear right{nullptr};
  torch::Tensor bias;
  SiblingImpl() {
    bias = register_parameter("bias", torch::zeros({4}));
    left = register_module("left", Nested());
    right = register_module("right", torch::nn::Linear(4, 4));
  }
  torch::Tensor forward(torch::Tensor x) { return right(left(x) + bias); }
};
FSDP_MODULE(Sibling);

TEST(Context, OrdersAndNames) {  // CTX-03 to CTX-05, CTX-15, CTX-16
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const auto p = zero3("dp");
    {
      FsdpContext ctx(mesh.device());
      Sibling m;
      {
        auto scope = fully_shard_context(ctx);
        EXPECT_EQ(current_fully_shard_context(), &ctx);
        fully_shard(m->left->inner, mesh, p);
        fully_shard(m->left, mesh, p);
        fully_shard(m->right, mesh, p);
        auto& root = fully_shard(m, mesh, p);
        EXPECT_EQ(root.context().state(), ctx.state());
        thrown<StateError>([&] { root.name(); });
      }
      EXPECT_EQ(current_fully_shard_context(), nullptr);
      EXPECT_THAT(names(ctx.forward_order()), ElementsAre("", "left", "left.inner", "right"));
      EXPECT_THAT(names(ctx.backward_order()), ElementsAre("", "right", "left", "left.inner"));
      EXPECT_THAT(ctx.roots(), ElementsAre(get_fsdp_module(*m)));
    }
    {
      FsdpContext ctx(mesh.device());
      Sibling m;
      fully_shard_context(ctx, [&] {
        fully_shard(m->left->inner, mesh, p);
        fully_shard(m->left, mesh, p);
        fully_shard(m->right, mesh, p);
      });
      EXPECT_THAT(names(ctx.forward_order()), ElementsAre("", "inner", ""));
      EXPECT_THAT(ctx.backward_order(),
                  ElementsAre(get_fsdp_module(*m->right), get_fsdp_module(*m->left), get_fsdp_module(*m->left->inner)));
      EXPECT_FALSE(get_fsdp_module(*m->left->inner)->is_root());
    }
  });
}

TEST(Context, Misuse) {  // CTX-06, CTX-08, CTX-09, CTX-11, CTX-12, MIC-01 to MIC-03
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const auto p = zero3("dp");
    Nested m;
    EXPECT_THAT(thrown<StateError>([&] { fully_shard(m, mesh, p); }), HasSubstr("no context is active"));
    FsdpContext first(mesh.device()), second(mesh.device());
    thrown<StateError>([&] { auto scope = microbatch(first, false); });
    {
      auto scope = fully_shard_context(first);
      thrown<StateError>([&] { auto inner = fully_shard_context(second); });
      EXPECT_EQ(current_fully_shard_context(), &first);
      fully_shard(m->inner, mesh, p);
    }
    thrown<StateError>([&] { first.finalize(); });
    thrown<StateError>([&] { auto again = fully_shard_context(first); });
    EXPECT_TRUE(first.is_last_microbatch());
    {
      auto outer = microbatch(first, false);
      try {
        auto inner = microbatch(first, true);
        EXPECT_TRUE(first.is_last_microbatch());
        throw 1;
      } catch (int) {
      }
      EXPECT_FALSE(first.is_last_microbatch());
    }
    EXPECT_TRUE(first.is_last_microbatch());
    try {
      auto scope = fully_shard_context(second);
      EXPECT_THAT(thrown<ValueError>([&] { fully_shard(m, mesh, p); }), HasSubstr("another context"));
      throw std::runtime_error("leaves the scope");
    } catch (const std::runtime_error&) {
    }
    EXPECT_FALSE(second.is_finalized());
    EXPECT_EQ(current_fully_shard_context(), nullptr);
    FsdpContext third(mesh.device());
    Nested other;
    try {
      auto scope = fully_shard_context(third);
      fully_shard(other, mesh, p);
      throw std::runtime_error("leaves the scope");
    } catch (const std::runtime_error&) {
    }
    EXPECT_THAT(thrown<StateError>([&] { other->forward(torch::ones({1, 4})); }), HasSubstr("finalize"));
    third.finalize();
    other->forward(torch::ones({1, 4}));
  });
}

TEST(FullyShard, Ownership) {  // FSH-01 to FSH-06
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Nested m;
    const auto handle = m->bias.unsafeGetTensorImpl();
    {
      auto scope = fully_shard_context(ctx);
      fully_shard(m->inner, mesh, zero3("dp"));
      fully_shard(m, mesh, zero3("dp"));
      EXPECT_THAT(thrown<ValueError>([&] { fully_shard(m->inner, mesh, zero3("dp")); }), HasSubstr("already"));
    }
    EXPECT_THAT(get_fsdp_module(*m->inner)->parameter_groups()[0]->fqns(), ElementsAre("weight"));
    EXPECT_THAT(get_fsdp_module(*m)->parameter_groups()[0]->fqns(), ElementsAre("bias"));
    EXPECT_EQ(m->bias.unsafeGetTensorImpl(), handle);
    EXPECT_TRUE(m->bias.is_leaf() && m->bias.requires_grad());
    EXPECT_EQ(m->bias.size(0), 2);
    EXPECT_EQ(get_fsdp_module(torch::nn::LinearImpl(1, 1)), nullptr);

    // A parent without parameters of its own.
    FsdpContext other(mesh.device());
    torch::nn::Sequential seq(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
    fill_by_formula(*seq);
    {
      auto scope = fully_shard_context(other);
      for (auto& child : *seq) fully_shard(*child.ptr(), mesh, zero3("dp"));
      EXPECT_EQ(fully_shard(seq, mesh, zero3("dp")).parameter_groups().size(), 0u);
    }
    torch::optim::SGD sgd(fsdp::parameters(*seq), 0.1);
    seq->forward(torch::ones({3, 4})).sum().backward();
    sgd.step();
    expect_at_rest(*seq);
  });
}

struct MixedImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
  MixedImpl() {
    a = register_module("a", torch::nn::Linear(4, 4));
    b = register_module("b", torch::nn::Linear(4, 4));
    c = register_module("c", torch::nn::Linear(4, 4));
    fill_by_formula(*this);
    b->to(torch::kBFloat16);
    a->bias.set_requires_grad(false);
  }
};

TEST(FullyShard, GroupsByDtypeAndTrainability) {  // FSH-05, MEM-08
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    auto m = std::make_shared<MixedImpl>();
    shard_one(*m, ctx, mesh, zero3("dp"));
    auto groups = get_fsdp_module(*m)->parameter_groups();
    ASSERT_EQ(groups.size(), 3u);
    EXPECT_THAT(groups[0]->fqns(), ElementsAre("a.weight", "c.weight", "c.bias"));
    EXPECT_THAT(groups[1]->fqns(), ElementsAre("a.bias"));
    EXPECT_FALSE(groups[1]->requires_grad());
    thrown<StateError>([&] { groups[1]->main_grad(); });
    EXPECT_THAT(groups[2]->fqns(), ElementsAre("b.weight", "b.bias"));
    EXPECT_EQ(groups[2]->dtype(), at::kBFloat16);
    EXPECT_EQ(m->b->weight.scalar_type(), at::kFloat);
  });
}

TEST(FullyShard, RefusalsLeaveTheModuleUntouched) {  // FSH-07 to FSH-14, FSH-26, B40
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Nested m;
    const auto x = torch::ones({1, 4});
    const auto expected = m->forward(x).detach();
    auto scope = fully_shard_context(ctx);
    auto p = hsdp("outer", "inner");
    auto refused = [&](const std::string& part, auto&&... arguments) {
      EXPECT_THAT(thrown<ValueError>([&] { fully_shard(arguments...); }), HasSubstr(part));
      EXPECT_TRUE(torch::equal(m->forward(x).detach(), expected));
      EXPECT_EQ(get_fsdp_module(*m), nullptr);
    };
    refused("no axis 'tp'", m, mesh, zero3("tp"));
    refused("comes after", m, mesh, hsdp("inner", "outer"));
    refused("named twice", m, mesh, hsdp("outer", 0));
    refused("out of range", m, mesh, zero3(7));
    for (double scale : {0.0, -1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)})
      refused("grad_scale", m, mesh, p, MixedPrecisionPolicy{}, scale);
    refused("forward_prefetch_size", m, mesh, p, MixedPrecisionPolicy{}, 1.0,
            SchedulePolicy{.forward_prefetch_size = -1});
    refused("main_params_dtype", m, mesh, p, MixedPrecisionPolicy{.main_params_dtype = at::kInt});
    refused("weights are never partial", m, mesh, Placements{{"outer"}, {Replicate{}}, {Shard{}}, {Partial{}}});
    refused("sharded outside", m, mesh,
            Placements{{"outer", "inner"}, {Shard{}, Replicate{}}, {Shard{}, Shard{}}, {Shard{}, Shard{}}});
    refused("no module hooks", m->inner, mesh, p, MixedPrecisionPolicy{}, 1.0,
            SchedulePolicy{.hooks = ExecutionHooks::kModule});
  });
}

TEST(FullyShard, RefusesUnusableParameters) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto attempt = [&](torch::nn::Module& module) {
      if (module.name().find("Linear") != std::string::npos) fill_by_formula(module);
      FsdpContext ctx(mesh.device());
      try {
        auto scope = fully_shard_context(ctx);
        fully_shard(module, mesh, zero3("dp"));
      } catch (const ValueError& e) {
        return std::string(e.what());
      }
      return std::string("accepted");
    };
    struct Odd : torch::nn::Module {
      explicit Odd(torch::Tensor t) { register_parameter("odd", t, t.is_floating_point()); }
    };
    auto integers = std::make_shared<Odd>(torch::ones({3}, torch::kInt));
    EXPECT_THAT(attempt(*integers), HasSubstr("parameter 'odd' [3] has dtype Int"));
    auto complex = std::make_shared<Odd>(torch::ones({3}, torch::kComplexFloat));
    EXPECT_THAT(attempt(*complex), HasSubstr("'odd'"));
    torch::nn::ModuleList list(torch::nn::Linear(2, 2));
    EXPECT_THAT(attempt(*list), HasSubstr("without a forward"));
    torch::nn::Linear used(2, 2);
    used->forward(torch::ones({1, 2})).sum().backward();
    EXPECT_THAT(attempt(*used), HasSubstr("already has a gradient"));
    used->zero_grad();
    EXPECT_EQ(attempt(*used), "accepted");
  });
}

TEST(FullyShard, DetectsWhatHappensBehindItsBack) {  // FSH-15, FSH-27, FSH-28
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto attempt = [&](const std::function<void(Nested&)>& change) {
      FsdpContext ctx(mesh.device());
      Nested m;
      shard_one(*m, ctx, mesh, zero3("dp"));
      m->forward(torch::ones({1, 4}));
      change(m);
      return thrown<StateError>([&] { m->forward(torch::ones({1, 4})); });
    };
    EXPECT_THAT(attempt([](Nested& m) { m->to(torch::kDouble); }), HasSubstr("'bias' was converted"));
    EXPECT_THAT(attempt([](Nested& m) { m->bias.set_data(torch::zeros({7})); }), HasSubstr("'bias' was resized"));
    EXPECT_THAT(attempt([](Nested& m) { m->bias.set_data(torch::zeros(m->bias.sizes())); }),
                HasSubstr("'bias' was given other storage"));
    EXPECT_THAT(attempt([](Nested& m) { m->inner->weight.set_requires_grad(false); }),
                HasSubstr("'inner.weight' had requires_grad"));
    EXPECT_THAT(attempt([](Nested& m) { m->replace(); }), HasSubstr("'bias' was replaced"));
  });
}

TEST(FullyShard, RanksThatDifferAreTold) {  // B13 (b), B29 (a)
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const auto owners = with_kind(zero3("dp"), TensorAtomic{});
    for (const auto layout : {ShardLayout::kPadded, ShardLayout::kUnpadded})
      for (const auto& placements : {zero3("dp"), owners}) {
        torch::nn::Linear shape(4, mesh.rank() == 2 ? 5 : 4);
        fill_by_formula(*shape);
        FsdpContext ctx(mesh.device(), {}, owners_in_turn(*shape, mesh.size()));
        auto text = thrown<StateError>([&] { shard_one(*shape, ctx, mesh, placements, {}, 1.0, {}, layout); });
        EXPECT_THAT(text, HasSubstr("'weight' [4, 4]"));
        EXPECT_THAT(text, HasSubstr("rank 2 has   parameter 'weight' [5, 4]"));
      }
    FsdpContext other(mesh.device());
    torch::nn::Linear values(4, 4);
    {
      torch::NoGradGuard no_grad;
      values->weight.fill_(1);
      values->bias.fill_(mesh.rank() == 1 ? 1 : 0);
    }
    EXPECT_THAT(thrown<StateError>([&] { shard_one(*values, other, mesh, ddp("dp")); }), HasSubstr("'bias'"));
  });
}

TEST(FullyShard, SavingShardsIsRefused) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Nested m;
    shard_one(*m, ctx, mesh, zero3("dp"));
    std::stringstream stream;
    EXPECT_THAT(thrown<StateError>([&] { torch::save(m, stream); }), HasSubstr("FullParameters"));
    thrown<StateError>([&] { m->clone(); });
  });
}

}  // namespace
}  // namespace fsdp::testing
