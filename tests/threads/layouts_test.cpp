/// Training in every layout, on parts of a mesh, in every dtype.
#include "support/ranks.h"

#include <atomic>
#include <map>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Module::to() does not go there.
void move_to_meta(torch::nn::Module& module) {
  for (auto& p : module.parameters())
    p.unsafeGetTensorImpl()->shallow_copy_from(torch::empty(p.sizes(), torch::kMeta).getIntrusivePtr());
}

std::unique_ptr<torch::optim::Optimizer> adam(std::vector<torch::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters), torch::optim::AdamWOptions(0.01));
}

struct Layout {
  std::string name;
  Placement kind;
  ShardLayout layout;
};

// faults B20 and B33: shards of unlike sizes, and ranks that own nothing, under a momentum optimizer and Adam.
TEST(Layouts, B20_B33_TrainTheSame) {
  const std::vector<Layout> layouts{{"padded rows", RowAtomic{}, ShardLayout::kPadded},
                                    {"unpadded rows", RowAtomic{}, ShardLayout::kUnpadded},
                                    {"padded blocks", BlockAtomic{4}, ShardLayout::kPadded},
                                    {"unpadded blocks", BlockAtomic{4}, ShardLayout::kUnpadded},
                                    {"tensors", TensorAtomic{}, ShardLayout::kPadded}};
  struct Case {
    std::vector<int64_t> shape;
    int64_t micro;
  };
  for (const auto& make : {MakeOptimizer(sgd), MakeOptimizer(adam)})
    for (const auto& c : std::vector<Case>{{{2}, 1}, {{3}, 3}, {{4}, 1}, {{2, 2}, 3}}) {
      int64_t ranks = 1;
      for (auto s : c.shape) ranks *= s;
      const auto reference = reference_run(ranks, 2, 6, c.micro, true, make);
      on_mesh(c.shape, [&](const DeviceMesh& mesh) {
        for (const auto& layout : layouts)
          for (const auto& s : mesh.ndim() == 1 ? one_axis() : two_axes()) {
            const bool whole = std::holds_alternative<TensorAtomic>(layout.kind);
            if (whole && (mesh.ndim() > 1 || s.name == "ddp")) continue;
            auto model = make_mlp(2);
            OwnerMap owners;
            int64_t next = 0;
            if (whole)  // the last rank owns nothing
              for (auto& p : model->parameters())
                owners[p.unsafeGetTensorImpl()] = next++ % std::max<int64_t>(1, mesh.size() - 1);
            FsdpContext ctx(mesh.device(), {}, owners);
            shard_mlp(*model, ctx, mesh, with_kind(s.placements, layout.kind), {}, 1.0, {}, layout.layout);
            auto optimizer = make(fsdp::parameters(*model));
            fsdp::testing::Run run;
            for (int64_t step = 0; step < 6; ++step) {
              optimizer->zero_grad();
              double total = 0;
              for (int64_t m = 0; m < c.micro; ++m) {
                auto scope = microbatch(ctx, m == c.micro - 1);
                auto loss = mlp_loss(*model, input_of(step, m, mesh.rank()), target_of(step, m, mesh.rank())) /
                            static_cast<double>(c.micro);
                loss.backward();
                total += loss.item<double>();
              }
              clip_grad_norm_(fsdp::parameters(*model), 1e6);  // accepts empty shards; too large to change anything
              optimizer->step();
              run.losses.push_back(mean_over_ranks(mesh, total));
            }
            run.weights = gathered(*model);
            EXPECT_LT(difference(reference, run), 1e-6) << layout.name << " " << s.name << " on " << ranks;
          }
      });
    }
}

TEST(Layouts, B33_UnpaddedStoresThePayloadAndPaddingIsReported) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    for (auto layout : {ShardLayout::kUnpadded, ShardLayout::kPadded}) {
      torch::nn::Sequential model(torch::nn::Linear(torch::nn::LinearOptions(7, 4).bias(false)),
                                  torch::nn::Linear(torch::nn::LinearOptions(11, 4).bias(false)),
                                  torch::nn::Linear(torch::nn::LinearOptions(13, 4).bias(false)));
      fill_by_formula(*model);
      FsdpContext ctx(mesh.device());
      fully_shard_context(ctx, [&] { fully_shard(model, mesh, zero3("dp"), {}, 1.0, {}, layout); });
      const auto* group = get_fsdp_module(*model)->parameter_groups()[0];
      auto stored = torch::tensor({group->main_weight().local_buffer().numel()}, torch::kLong);
      mesh.communicator("dp").all_reduce(stored).wait();
      EXPECT_EQ(stored.item<int64_t>(), group->main_weight().layout().size);
      if (layout == ShardLayout::kUnpadded) {
        EXPECT_EQ(stored.item<int64_t>(), 124);
      } else {
        EXPECT_LE(stored.item<int64_t>(), 2 * 124);
        EXPECT_THAT(group->describe(), HasSubstr("124 elements + " + std::to_string(stored.item<int64_t>() - 124)));
      }
    }
  });
}

// One group of one dtype, in two buffers, because its rows do not fit together: no padding, and the same training.
TEST(Layouts, AGroupIsDividedWhereThatSavesPadding) {
  auto make = [] {
    auto model = std::make_shared<BlockImpl>(640, 32);
    fill_by_formula(*model);
    return model;
  };
  auto train = [](torch::nn::Module& module, const std::function<torch::Tensor(int64_t)>& loss) {
    torch::optim::SGD optimizer(fsdp::parameters(module), torch::optim::SGDOptions(0.1).momentum(0.9));
    std::vector<double> losses;
    for (int64_t step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      auto l = loss(step);
      l.backward();
      optimizer.step();
      losses.push_back(l.item<double>());
    }
    return losses;
  };
  auto reference = make();
  const auto expected = train(*reference, [&](int64_t s) {
    return reference->forward(wave({3, 640}, static_cast<double>(s))).pow(2).mean();
  });
  on_mesh({5}, [&](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      auto model = std::make_shared<Hooked<BlockImpl>>(640, 32);
      fill_by_formula(*model);
      shard_one(*model, ctx, mesh, s.placements);
      const auto groups = get_fsdp_module(*model)->parameter_groups();
      int64_t stored = 0, payload = 0, tensors = 0;
      for (const auto* group : groups) {
        stored += group->main_weight().layout().size;
        payload += group->main_weight().layout().payload();
        tensors += static_cast<int64_t>(group->fqns().size());
      }
      EXPECT_EQ(tensors, 4);
      EXPECT_EQ(payload, 2 * 640 * 32 + 640 + 32);
      EXPECT_EQ(groups.size() > 1, s.name != "ddp") << s.name;
      if (s.name != "ddp") {
        std::vector<Shape> shapes;
        for (const auto& p : make()->parameters()) shapes.push_back(p.sizes().vec());
        EXPECT_LT(stored + 5 * 256, build_row_atomic_layout(shapes, 5).size);
      }
      const auto losses = train(*model, [&](int64_t step) {
        return model->forward(wave({3, 640}, static_cast<double>(step))).pow(2).mean();
      });
      for (size_t i = 0; i < losses.size(); ++i)
        EXPECT_NEAR(losses[i], expected[i], 1e-6 * (1 + expected[i])) << s.name;
    }
  });
}

/// Block-scaled fp8, by the book: blocks of 32 along one dimension, the last may be short; a power of two for each.
std::pair<torch::Tensor, torch::Tensor> quantised(const torch::Tensor& w, int64_t along) {
  std::vector<torch::Tensor> payloads, scales;
  for (int64_t begin = 0; begin < w.size(along); begin += 32) {
    const auto block = w.narrow(along, begin, std::min<int64_t>(32, w.size(along) - begin));
    const auto scale = torch::exp2(torch::ceil(torch::log2(block.abs().amax(along, /*keepdim=*/true) / 448.0)));
    payloads.push_back((block / scale).to(at::ScalarType::Float8_e4m3fn).view(torch::kByte));
    scales.push_back(scale);
  }
  if (payloads.empty()) return {w.to(torch::kByte), w};
  return {torch::cat(payloads, along), torch::cat(scales, along)};
}

// What MXFP8 stands on: with BlockAtomic(32) a rank quantises its own rows, and gets the bits of the whole weight,
// payload and scales in both orientations, after every step.
TEST(Layouts, B52_BlocksOf32RowsQuantiseAsTheWhole) {
  struct Case {
    int64_t rows, ranks, owners;
  };
  for (const auto& c : std::vector<Case>{{96, 5, 3}, {128, 4, 4}, {40, 2, 2}})
    for (const auto layout : {ShardLayout::kPadded, ShardLayout::kUnpadded}) {
      std::atomic<int64_t> owners = 0;
      on_mesh({c.ranks}, [&](const DeviceMesh& mesh) {
        Probe model(c.rows, 64);
        fill_by_formula(*model);
        FsdpContext ctx(mesh.device());
        MixedPrecisionPolicy precision;
        precision.param_dtype = torch::kBFloat16;
        {
          auto scope = fully_shard_context(ctx);
          fully_shard(model, mesh, with_kind(zero3("dp"), BlockAtomic{32}), precision, 1.0, {}, layout);
        }
        FullyShardOptimizer<torch::optim::SGD> optimizer(fsdp::parameters(*model), torch::optim::SGDOptions(0.01));
        const auto* group = get_fsdp_module(*model)->parameter_groups()[0];
        const auto rows = group->main_weight().local_rows(0);
        EXPECT_EQ(rows.begin % 32, 0);
        EXPECT_TRUE(rows.end % 32 == 0 || rows.end == c.rows);
        if (rows.begin < rows.end) ++owners;
        for (int64_t step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          model->forward(1.0 + static_cast<double>(step)).backward();
          optimizer.step();
          EXPECT_EQ(model->weight.scalar_type(), torch::kFloat);
          const auto mine = group->main_weight().local_tensor(0).clone();
          const auto whole = gathered(*model)[0];
          for (const int64_t along : {0, 1}) {
            const auto [payload, scales] = quantised(mine, along);
            const auto [whole_payload, whole_scales] = quantised(whole, along);
            const int64_t first = along == 0 ? rows.begin / 32 : rows.begin;
            EXPECT_TRUE(torch::equal(payload, whole_payload.slice(0, rows.begin, rows.end)));
            EXPECT_TRUE(torch::equal(scales, whole_scales.slice(0, first, first + scales.size(0))));
          }
        }
      });
      EXPECT_EQ(owners, c.owners);
    }
}

/// Row e of the result came from rank e of the axis; the gradient goes back the same way.
struct Exchange : torch::autograd::Function<Exchange> {
  static torch::Tensor run(Communicator* comm, const torch::Tensor& x) {
    auto in = x.contiguous();
    auto out = torch::empty_like(in);
    const std::vector<int64_t> counts(static_cast<size_t>(comm->size()), in.numel() / comm->size());
    comm->all_to_all(out.view({-1}), in.view({-1}), counts, counts).wait();
    return out;
  }
  static torch::Tensor forward(AutogradContext* ctx, torch::Tensor x, int64_t comm) {
    ctx->saved_data["comm"] = comm;
    return run(reinterpret_cast<Communicator*>(comm), x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    return {run(reinterpret_cast<Communicator*>(ctx->saved_data["comm"].toInt()), gradients[0]), torch::Tensor()};
  }
};

struct ExpertImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  explicit ExpertImpl(int64_t index) {
    linear = register_module("linear", torch::nn::Linear(4, 4));
    torch::NoGradGuard no_grad;
    linear->weight.copy_(wave({4, 4}, 3.0 + static_cast<double>(index)) * 0.3);
    linear->bias.copy_(wave({4}, 8.0 + static_cast<double>(index)) * 0.3);
  }
  torch::Tensor forward(torch::Tensor x) { return torch::tanh(linear(x)); }
};
FSDP_MODULE(Expert);

struct MoeImpl : torch::nn::Module {
  torch::nn::Linear shared{nullptr};
  std::vector<Expert> experts;
  explicit MoeImpl(std::vector<int64_t> indices) {
    shared = register_module("shared", torch::nn::Linear(4, 4));
    torch::NoGradGuard no_grad;
    shared->weight.copy_(wave({4, 4}, 1.0) * 0.3);
    shared->bias.copy_(wave({4}, 2.0) * 0.3);
    for (auto i : indices) experts.push_back(register_module("expert" + std::to_string(i), Expert(i)));
  }
  /// Tokens [experts, n, 4] by expert: here all experts are at hand, or the one of this rank.
  torch::Tensor forward(torch::Tensor tokens, Communicator* ep) {
    auto x = shared(tokens);
    if (!ep) return torch::stack({experts[0](x[0]), experts[1](x[1])});
    return Exchange::apply(experts[0](Exchange::apply(x, reinterpret_cast<int64_t>(ep))),
                           reinterpret_cast<int64_t>(ep));
  }
};
TORCH_MODULE(Moe);

torch::Tensor tokens_of(int64_t step, int64_t rank) {
  return wave({2, 3, 4}, 1.0 + 0.5 * static_cast<double>(step) + 0.7 * static_cast<double>(rank));
}

// behaviours EXP-01, EXP-02, EXP-04: experts on their own mesh and scale, the rest on all ranks.
TEST(Layouts, EXP01_ExpertParallel) {
  for (int64_t expert_ranks : {1, 2}) {
    const int64_t ranks = 2 * expert_ranks;
    Moe reference(std::vector<int64_t>{0, 1});
    torch::optim::SGD sgd(reference->parameters(), 0.1);
    std::vector<double> losses;
    for (int64_t step = 0; step < 6; ++step) {
      sgd.zero_grad();
      double total = 0;
      for (int64_t r = 0; r < ranks; ++r) {
        auto loss = reference(tokens_of(step, r), nullptr).pow(2).mean() / static_cast<double>(ranks);
        loss.backward();
        total += loss.item<double>();
      }
      sgd.step();
      losses.push_back(total);
    }
    run_threads(ranks, [&](std::shared_ptr<World> world) {
      auto mesh = init_device_mesh(world, {2, expert_ranks}, {"ep", "edp"});
      for (const auto& s : {zero3("edp"), zero2("edp"), zero1("edp"), ddp("edp")}) {
        const auto e = mesh.local_rank("ep");
        FsdpContext ctx(mesh.device());
        Moe model(std::vector<int64_t>{e});
        {
          auto scope = fully_shard_context(ctx);
          fully_shard(model->experts[0], mesh, s, {}, 0.5);
          fully_shard(model, mesh,
                      Placements{{"ep", "edp"}, {Shard{}, Shard{}}, {Shard{}, Shard{}}, {Shard{}, Shard{}}});
        }
        torch::optim::SGD optimizer(fsdp::parameters(*model), 0.1);
        for (int64_t step = 0; step < 6; ++step) {
          optimizer.zero_grad();
          auto loss = model(tokens_of(step, world->rank()), &mesh.communicator("ep")).pow(2).mean();
          loss.backward();
          optimizer.step();
          EXPECT_NEAR(mean_over_ranks(mesh, loss.item<double>()), losses[static_cast<size_t>(step)], 1e-6);
        }
        const auto got = gathered(*model->experts[0]);
        EXPECT_LT(off_by(got[0] - reference->experts[static_cast<size_t>(e)]->linear->weight.detach(), 0), 1e-6);
        EXPECT_LT(off_by(gathered(*model)[0] - reference->shared->weight.detach(), 0), 1e-6);
      }
    });
  }
}

// Axes that are not data parallel stay outside: each column of the mesh trains its own model.
TEST(Layouts, PartOfAMesh) {
  run_threads(8, [](std::shared_ptr<World> world) {
    auto mesh = init_device_mesh(world, {2, 2, 2}, {"pp", "dp", "tp"});
    const auto column = mesh.local_rank("pp") * 2 + mesh.local_rank("tp");
    auto make = [&] {
      auto model = make_mlp(1);
      torch::NoGradGuard no_grad;
      model->head->bias.add_(static_cast<double>(column));
      return model;
    };
    auto reference = make();
    auto expected = sgd(reference->parameters());
    FsdpContext ctx(mesh.device());
    auto model = make();
    shard_mlp(*model, ctx, mesh, zero3("dp"));
    auto optimizer = sgd(fsdp::parameters(*model));
    for (int64_t step = 0; step < 6; ++step) {
      expected->zero_grad();
      for (int64_t r = 0; r < 2; ++r)
        (mlp_loss(*reference, input_of(step, 0, r), target_of(step, 0, r)) / 2).backward();
      expected->step();
      optimizer->zero_grad();
      const auto r = mesh.local_rank("dp");
      mlp_loss(*model, input_of(step, 0, r), target_of(step, 0, r)).backward();
      optimizer->step();
    }
    const auto got = gathered(*model);
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_LT(off_by(got[i] - reference->parameters()[i].detach(), 0), 1e-6) << "column " << column;
  });
}

// faults B07: equal meshes of other shapes train alike, and every rank holds the rows that the layout says.
TEST(Layouts, B07_MeshesOfEightRanks) {
  for (int64_t micro : {1, 3}) {
    const auto reference = reference_run(8, 3, 6, micro, micro == 1);
    for (const auto& shape : std::vector<std::vector<int64_t>>{{8}, {2, 4}, {4, 2}})
      on_mesh(
          shape,
          [&](const DeviceMesh& mesh) {
            for (const auto& s : mesh.ndim() == 1 ? one_axis() : two_axes())
              EXPECT_LT(difference(reference, sharded_run(mesh, s.placements, 3, 6, micro, micro == 1)), 1e-6)
                  << s.name;
            auto model = make_mlp(1);
            FsdpContext ctx(mesh.device());
            shard_mlp(*model, ctx, mesh, mesh.ndim() == 1 ? zero3("dp") : hfsdp("outer", "inner"));
            const auto full = gathered(*make_mlp(1));
            const auto* group = get_fsdp_module(*model->blocks[0])->parameter_groups()[0];
            // Inner axis most significant: this rank's segment among all.
            const auto segment = mesh.ndim() == 1
                                     ? mesh.rank()
                                     : mesh.local_rank("inner") * mesh.size("outer") + mesh.local_rank("outer");
            for (int64_t t = 0; t < 4; ++t) {
              const auto rows = group->main_weight().layout().rows(t, segment);
              EXPECT_TRUE(torch::equal(group->main_weight().local_tensor(t),
                                       full[static_cast<size_t>(t)].narrow(0, rows.begin, rows.end - rows.begin)));
            }
          },
          60'000);
  }
}

TEST(Layouts, ParametersOfAnyDtype) {
  for (auto type : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    const double tolerance = type == torch::kDouble ? 1e-12 : type == torch::kFloat ? 1e-6 : 3e-2;
    auto make = [&] {
      auto model = make_mlp(2);
      model->to(type);
      return model;
    };
    const auto target = [&](int64_t s, int64_t r) { return target_of(s, 0, r).to(type); };
    auto reference = make();
    auto expected = sgd(reference->parameters());
    for (int64_t s = 0; s < 6; ++s) {
      expected->zero_grad();
      for (int64_t r = 0; r < 3; ++r) (mlp_loss(*reference, input_of(s, 0, r).to(type), target(s, r)) / 3).backward();
      expected->step();
    }
    on_mesh({3}, [&](const DeviceMesh& mesh) {
      for (const auto& s : one_axis()) {
        FsdpContext ctx(mesh.device());
        auto model = make();
        shard_mlp(*model, ctx, mesh, s.placements, {.main_params_dtype = std::nullopt});
        EXPECT_EQ(model->head->weight.scalar_type(), type);
        auto optimizer = sgd(fsdp::parameters(*model));
        for (int64_t step = 0; step < 6; ++step) {
          optimizer->zero_grad();
          mlp_loss(*model, input_of(step, 0, mesh.rank()).to(type), target(step, mesh.rank())).backward();
          EXPECT_EQ(model->head->weight.grad().scalar_type(), type);
          optimizer->step();
        }
        const auto got = gathered(*model);
        for (size_t i = 0; i < got.size(); ++i)
          EXPECT_LT(off_by(got[i].to(torch::kDouble) - reference->parameters()[i].detach().to(torch::kDouble), 0),
                    tolerance)
              << s.name << " " << c10::toString(type) << " weight " << i;
      }
    });
  }
}

// faults B03: on one rank nothing is communicated and not a bit differs, from the meta device too.
TEST(Layouts, B03_OneRankIsBitIdentical) {
  auto reference = make_mlp(2);
  auto expected = adam(reference->parameters());
  for (int64_t s = 0; s < 6; ++s) {
    expected->zero_grad();
    mlp_loss(*reference, input_of(s, 0, 0), target_of(s, 0, 0)).backward();
    expected->step();
  }
  for (bool meta : {false, true})
    for (const auto& shape : std::vector<std::vector<int64_t>>{{1}, {1, 1}})
      on_mesh(shape, [&](const DeviceMesh& mesh) {
        for (const auto& s : mesh.ndim() == 1 ? one_axis() : two_axes()) {
          auto model = make_mlp(2);
          std::map<std::string, torch::Tensor> values;
          for (auto& p : model->named_parameters()) values[p.key()] = p.value().detach().clone();
          if (meta) move_to_meta(*model);
          FsdpContext ctx(mesh.device());
          {
            auto scope = fully_shard_context(ctx);
            auto shard = [&](torch::nn::Module& m, const std::string& prefix) {
              fully_shard(m, mesh, s.placements, {}, 1.0, {}, ShardLayout::kPadded,
                          [&values, prefix](const std::string& fqn, torch::Tensor full) {
                            full.copy_(values.at(prefix + fqn));
                          });
            };
            for (int64_t i = 0; i < 2; ++i) shard(*model->blocks[i], "blocks." + std::to_string(i) + ".");
            shard(*model, "");
          }
          CollectiveLog log(mesh.world());
          auto optimizer = adam(fsdp::parameters(*model));
          for (int64_t step = 0; step < 6; ++step) {
            optimizer->zero_grad();
            mlp_loss(*model, input_of(step, 0, 0), target_of(step, 0, 0)).backward();
            optimizer->step();
          }
          EXPECT_TRUE(log.records().empty()) << s.name;
          const auto got = gathered(*model);
          for (size_t i = 0; i < got.size(); ++i)
            EXPECT_TRUE(torch::equal(got[i], reference->parameters()[i]))
                << s.name << " meta " << meta << " weight " << i;
        }
      });
}

// faults B13 (a): weights left on the meta device are an error that names the parameter, until they are filled.
TEST(Layouts, B13_UnfilledMetaParametersAreNamed) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto model = make_mlp(1);
    move_to_meta(*model);
    FsdpContext ctx(mesh.device());
    shard_mlp(*model, ctx, mesh, zero3("dp"));
    const auto x = input_of(0, 0, 0);
    EXPECT_THAT(thrown<StateError>([&] { model->forward(x); }), HasSubstr("'head.weight'"));
    {
      torch::NoGradGuard no_grad;
      for (auto& p : fsdp::parameters(*model)) p.fill_(0.1);
    }
    expect_at_rest(*model);
    EXPECT_TRUE(model->forward(x).defined());
  });
}

}  // namespace
}  // namespace fsdp::testing
