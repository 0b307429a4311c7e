/// What ends up in the gradients: sums over microbatches, means over ranks, scales, precision.
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

std::vector<NamedPlacements> strategies(const DeviceMesh& mesh) { return mesh.ndim() == 1 ? one_axis() : two_axes(); }

// behaviours FSH-42, faults B06, B12: the mean over ranks of the sum over microbatches.
TEST(Gradients, SumOverMicrobatchesMeanOverRanks) {
  for (auto shape : std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {4}, {2, 2}, {2, 1}, {1, 2}})
    on_mesh(shape, [](const DeviceMesh& mesh) {
      const auto n = static_cast<double>(mesh.size());
      for (auto kind : {RuntimePolicy::GradReduction::kEveryMicrobatch, RuntimePolicy::GradReduction::kLastMicrobatch})
        for (const auto& s : strategies(mesh)) {
          FsdpContext ctx(mesh.device(), {.grad_reduction = kind});
          Probe probe(4, 3);
          shard_one(*probe, ctx, mesh, s.placements);
          for (int step = 0; step < 2; ++step) {
            for (int k = 0; k < 3; ++k) {
              auto scope = microbatch(ctx, k == 2);
              probe->forward(static_cast<double>((mesh.rank() + 1) * (k + 1))).backward();
            }
            EXPECT_LT(off_by(probe->weight.grad(), (n + 1) / 2 * 6), 1e-6) << s.name << " step " << step;
            step == 0 ? probe->zero_grad() : void();
          }
          // Kept gradients accumulate (zero_grad was not called after step 1).
          probe->forward(1.0).backward();
          EXPECT_LT(off_by(probe->weight.grad(), (n + 1) / 2 * 6 + 1), 1e-6) << s.name;
        }
    });
}

// faults B04: 3 microbatches of 1, 2, 4 and 16 of 1, with one rank and with an axis of size one.
TEST(Gradients, B04_OneRankDoesNotDouble) {
  for (auto shape : std::vector<std::vector<int64_t>>{{1}, {2}, {2, 1}, {1, 2}})
    on_mesh(shape, [](const DeviceMesh& mesh) {
      for (const auto& s : strategies(mesh))
        for (auto cs : {std::vector<double>{1, 2, 4}, std::vector<double>(16, 1.0)}) {
          FsdpContext ctx(mesh.device());
          Probe probe(4, 3);
          shard_one(*probe, ctx, mesh, s.placements);
          double sum = 0;
          for (size_t k = 0; k < cs.size(); ++k) {
            auto scope = microbatch(ctx, k + 1 == cs.size());
            probe->forward(cs[k]).backward();
            sum += cs[k];
          }
          EXPECT_EQ(off_by(probe->weight.grad(), sum), 0.0) << s.name;
        }
    });
}

// behaviours HSD-08, HSD-09, HSD-10: sequences of last, not last and both ways to clear.
TEST(Gradients, SequencesOfLastAndNotLast) {
  for (auto shape : std::vector<std::vector<int64_t>>{{2}, {3}, {2, 2}})
    on_mesh(shape, [](const DeviceMesh& mesh) {
      const double mean = (static_cast<double>(mesh.size()) + 1) / 2;
      for (const auto& s : strategies(mesh)) {
        FsdpContext ctx(mesh.device());
        Probe probe(5, 2);
        shard_one(*probe, ctx, mesh, s.placements);
        auto run = [&](bool last) {
          auto scope = microbatch(ctx, last);
          probe->forward(static_cast<double>(mesh.rank() + 1)).backward();
        };
        auto expect = [&](double times, const char* what) {
          EXPECT_LT(off_by(probe->weight.grad(), times * mean), 1e-5) << s.name << ": " << what;
        };
        run(true), run(true);
        expect(2, "two last");
        run(false), run(true);
        expect(4, "then not last, last");
        probe->zero_grad(/*set_to_none=*/false);
        EXPECT_EQ(off_by(probe->weight.grad(), 0), 0.0);
        run(false), run(true);
        expect(2, "zeroed in place, not last, last");
        probe->zero_grad();
        run(false), run(false), run(true);
        expect(3, "cleared, three microbatches");
        probe->zero_grad();
        run(false);
        probe->zero_grad();
        run(true);
        expect(1, "cleared in the middle");
        run(false);
        probe->zero_grad(false);
        run(true);
        expect(1, "zeroed in the middle");
      }
    });
}

// behaviours EXP, spec "Gradients": the scale applies to each contribution.
TEST(Gradients, ScaleAppliesToEachContribution) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& s : one_axis())
      for (double scale : {0.25, 2.0}) {
        FsdpContext ctx(mesh.device());
        Probe probe(4, 3);
        shard_one(*probe, ctx, mesh, s.placements, {}, scale);
        for (int k = 0; k < 3; ++k) {
          auto scope = microbatch(ctx, k == 2);
          probe->forward(static_cast<double>(mesh.rank() + 1)).backward();
        }
        EXPECT_LT(off_by(probe->weight.grad(), 4.5 * scale), 1e-6) << s.name;
      }
  });
}

// faults B09: bf16 compute follows fp32 weights, step by step, with no adapter; also in a no-grad forward.
TEST(Gradients, B09_ComputeWeightsFollowTheOptimizer) {
  for (auto shape : std::vector<std::vector<int64_t>>{{1}, {2}, {2, 2}})
    on_mesh(shape, [](const DeviceMesh& mesh) {
      for (const auto& s : strategies(mesh)) {
        FsdpContext ctx(mesh.device());
        Probe probe(4, 3);
        shard_one(*probe, ctx, mesh, s.placements, {.param_dtype = at::kBFloat16});
        torch::optim::SGD optimizer(fsdp::parameters(*probe), 0.25);
        for (double expected : {12.0, 9.0, 6.0, 3.0}) {
          {
            torch::NoGradGuard no_grad;
            EXPECT_EQ(probe->forward(1.0).item<double>(), expected) << s.name;
          }
          optimizer.zero_grad();
          auto out = probe->forward(1.0);
          EXPECT_EQ(out.scalar_type(), at::kBFloat16);
          EXPECT_EQ(out.item<double>(), expected) << s.name;
          out.backward();
          optimizer.step();
          EXPECT_EQ(probe->weight.scalar_type(), at::kFloat);
        }
      }
    });
}

// spec "sync_model_weights": a write no version counter and no operator sees.
TEST(Gradients, RawWritesNeedSyncModelWeights) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Probe probe(4, 3);
    shard_one(*probe, ctx, mesh, zero2("dp"), {.param_dtype = at::kBFloat16});
    torch::NoGradGuard no_grad;
    EXPECT_EQ(probe->forward(1.0).item<double>(), 12.0);
    auto local = probe->weight;
    std::fill_n(local.data_ptr<float>(), local.numel(), 2.0f);
    EXPECT_EQ(ctx.sync_model_weights(), 1);
    EXPECT_EQ(probe->forward(1.0).item<double>(), 24.0);
  });
}

// faults B11 (a): contributions are added in fp32; (b): both axes of a two-axis reduction honour the dtype.
TEST(Gradients, B11_AccumulatesInMainPrecision) {
  const MixedPrecisionPolicy policy{
      .main_grads_dtype = at::kFloat, .grad_comm_dtype = at::kFloat, .param_dtype = at::kBFloat16};
  const double tiny = std::ldexp(1.0, -9);
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    for (const auto& s : one_axis()) {
      FsdpContext ctx(mesh.device());
      Probe probe(4, 3);
      shard_one(*probe, ctx, mesh, s.placements, policy);
      for (int k = 0; k < 9; ++k) {
        auto scope = microbatch(ctx, k == 8);
        probe->forward(k == 0 ? 1.0 : tiny).backward();
      }
      EXPECT_EQ(probe->weight.grad().scalar_type(), at::kFloat);
      EXPECT_EQ(off_by(probe->weight.grad(), 1.015625), 0.0) << s.name;
    }
  });
  for (auto shape : std::vector<std::vector<int64_t>>{{2, 1}, {2, 2}})
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const auto& s : two_axes()) {
        FsdpContext ctx(mesh.device());
        Probe probe(4, 3);
        shard_one(*probe, ctx, mesh, s.placements, policy);
        probe->forward(mesh.local_rank("outer") == 0 ? 1.0 : tiny).backward();
        EXPECT_EQ(off_by(probe->weight.grad(), 0.5009765625), 0.0) << s.name;
      }
    });
}

// behaviours MIC-06: an optimizer step, or any other read, of gradients that are not reduced.
TEST(Gradients, UnreducedGradientsRefuseToBeRead) {
  for (auto shape : std::vector<std::vector<int64_t>>{{2}, {2, 2}})
    on_mesh(shape, [](const DeviceMesh& mesh) {
      for (const auto& p : {mesh.ndim() == 1 ? ddp("dp") : hsdp("outer", "inner"),
                            mesh.ndim() == 1 ? zero1("dp") : hfsdp("outer", "inner")}) {
        FsdpContext ctx(mesh.device());
        Probe probe(4, 3);
        shard_one(*probe, ctx, mesh, p);
        torch::optim::SGD sgd(fsdp::parameters(*probe), 0.1);
        FullyShardOptimizer<torch::optim::AdamW> adam(fsdp::parameters(*probe), torch::optim::AdamWOptions(0.1));
        const auto before = gathered(*probe)[0];
        {
          auto scope = microbatch(ctx, false);
          probe->forward(1.0).backward();
        }
        EXPECT_THAT(thrown<StateError>([&] { sgd.step(); }), HasSubstr("microbatch(ctx, true)"));
        thrown<StateError>([&] { adam.step(); });
        thrown<StateError>([&] { clip_grad_norm_(fsdp::parameters(*probe), 1.0); });
        thrown<StateError>([&] { probe->weight.grad().sum(); });
        EXPECT_TRUE(torch::equal(before, gathered(*probe)[0]));
        probe->forward(1.0).backward();
        EXPECT_EQ(off_by(probe->weight.grad(), 2.0), 0.0);
        sgd.step();
      }
    });
}

// spec "Gradients at rest": sharded on every axis, they are readable before the last microbatch.
TEST(Gradients, ShardedGradientsAreReadableEarly) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& p : {zero2("dp"), zero3("dp")})
      for (bool managed : {false, true}) {
        FsdpContext ctx(mesh.device(), {.caller_managed_grad_sync = managed});
        Probe probe(4, 3);
        shard_one(*probe, ctx, mesh, p);
        auto scope = microbatch(ctx, false);
        probe->forward(1.0).backward();
        if (managed) thrown<StateError>([&] { probe->weight.grad().sum(); });
        ctx.finish_grad_sync();
        EXPECT_EQ(off_by(probe->weight.grad(), 1.0), 0.0);
        probe->forward(1.0).backward();
        ctx.finish_grad_sync();
        EXPECT_EQ(off_by(probe->weight.grad(), 2.0), 0.0);
      }
  });
}

// faults B21: the norm is global, equal everywhere, and the gradients are really scaled.
TEST(Gradients, B21_ClipScalesByTheGlobalNorm) {
  for (auto shape : std::vector<std::vector<int64_t>>{{1}, {4}, {3}, {2, 2}})
    on_mesh(shape, [](const DeviceMesh& mesh) {
      for (const auto& s : strategies(mesh)) {
        FsdpContext ctx(mesh.device());
        Probe probe(4, 3);
        shard_one(*probe, ctx, mesh, s.placements);
        probe->forward(2.5).backward();
        CollectiveLog log(mesh.world());
        const auto norm = clip_grad_norm_(fsdp::parameters(*probe), 1.0);
        for (const auto& r : log.records()) EXPECT_EQ(r.elements, 1) << r.operation;
        EXPECT_EQ(norm.dim(), 0);
        EXPECT_NEAR(norm.item<double>(), 8.660254, 1e-5) << s.name;
        EXPECT_LT(off_by(probe->weight.grad(), 0.288675), 1e-6) << s.name;
        EXPECT_NEAR(clip_grad_norm_(fsdp::parameters(*probe), 1.0).item<double>(), 1.0, 1e-5);
        EXPECT_NEAR(clip_grad_norm_(fsdp::parameters(*probe), 1.0, INFINITY).item<double>(), 0.288675, 1e-6);
        thrown<ValueError>([&] { clip_grad_norm_(fsdp::parameters(*probe), 0.0); });
        probe->zero_grad();
        EXPECT_EQ(clip_grad_norm_(fsdp::parameters(*probe), 1.0).item<double>(), 0.0);
        probe->forward(NAN).backward();
        thrown<StateError>([&] { clip_grad_norm_(fsdp::parameters(*probe), 1.0, 2.0, true); });
      }
    });
}

// behaviours OPT-01 to OPT-05: gradients of another dtype than the weights, with and without the adapter; closures.
TEST(Gradients, OptimizersWithLowPrecisionGradients) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    FsdpContext ctx(mesh.device());
    Probe probe(4, 3, at::kBFloat16);
    shard_one(*probe, ctx, mesh, zero3("dp"));
    FullyShardOptimizer<torch::optim::SGD> optimizer(fsdp::parameters(*probe), torch::optim::SGDOptions(0.25));
    auto loss = optimizer.step([&] {
      optimizer.zero_grad();
      auto l = probe->forward(1.0);
      l.backward();
      return l;
    });
    EXPECT_EQ(loss.item<double>(), 12.0);
    EXPECT_EQ(probe->weight.grad().scalar_type(), at::kBFloat16);
    EXPECT_EQ(off_by(probe->weight, 0.75), 0.0);
    torch::NoGradGuard no_grad;
    EXPECT_EQ(probe->forward(1.0).item<double>(), 9.0);
  });
}

}  // namespace
}  // namespace fsdp::testing
