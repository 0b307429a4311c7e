/// What is alive at once, and units that run in changing orders or on some ranks only.
#include "support/ranks.h"

#include <map>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

/// Bytes that this thread allocates and frees on the CPU.
struct AllocationCounter : c10::MemoryReportingInfoBase {
  int64_t now = 0, peak = 0;
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
    now += size;
    peak = std::max(peak, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
};

struct LinearUnitImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  explicit LinearUnitImpl(int64_t n) { linear = register_module("linear", torch::nn::Linear(n, n)); }
  torch::Tensor forward(torch::Tensor x) { return torch::relu(linear(x)); }
};
FSDP_MODULE(LinearUnit);

struct StackImpl : torch::nn::Module {
  std::vector<LinearUnit> layers;
  StackImpl(int64_t depth, int64_t width) {
    for (int64_t i = 0; i < depth; ++i) layers.push_back(register_module(std::to_string(i), LinearUnit(width)));
    torch::NoGradGuard no_grad;
    for (auto& p : parameters()) p.fill_(0.01);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& l : layers) x = l(x);
    return x;
  }
};
FSDP_MODULE(Stack);

constexpr int64_t kWidth = 64;
constexpr int64_t kUnit = (kWidth * kWidth + kWidth) * 4;  // bytes of one layer in fp32

void shard_stack(Stack& model, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& p,
                 MixedPrecisionPolicy precision = {}, SchedulePolicy schedule = {}) {
  auto scope = fully_shard_context(ctx);
  for (auto& l : model->layers) fully_shard(l, mesh, p, precision, 1.0, schedule);
  fully_shard(model, mesh, p, precision, 1.0, schedule);
}

// faults B30, behaviours MEM-09: at most two units' weights and one packed gradient, at any depth.
TEST(Memory, B30_BoundDoesNotGrowWithDepth) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& p : {zero2("dp"), zero3("dp")})
      for (bool bf16 : {false, true}) {
        MixedPrecisionPolicy precision;
        if (bf16) precision = {.grad_comm_dtype = at::kFloat, .param_dtype = at::kBFloat16};
        std::vector<int64_t> peaks;
        for (int64_t depth : {4, 16, 64}) {
          FsdpContext ctx(mesh.device());
          Stack model(depth, kWidth);
          shard_stack(model, ctx, mesh, p, precision);
          const auto type = bf16 ? torch::kBFloat16 : torch::kFloat;
          for (int step = 0; step < 2; ++step) {
            ctx.reset_peak_memory();
            model(torch::ones({2, kWidth}, type)).sum().backward();
          }
          const auto memory = ctx.transient_memory();
          EXPECT_EQ(memory.bytes, 0);
          peaks.push_back(memory.peak_bytes);
          EXPECT_LE(memory.pooled_bytes, memory.peak_bytes + kUnit);
          // Weights in the compute dtype; the packed gradient as it is sent, and beside it the shard it becomes.
          const int64_t weights = bf16 ? kUnit : 2 * kUnit;
          EXPECT_LE(memory.peak_bytes, weights + kUnit + kUnit / 2 + 1024) << "depth " << depth << " bf16 " << bf16;
        }
        EXPECT_EQ(peaks[0], peaks[1]);
        EXPECT_EQ(peaks[1], peaks[2]);
      }
  });
}

// faults B31, behaviours MEM-06: sharding more never takes more memory, measured at the allocator.
TEST(Memory, B31_MoreShardingTakesLess) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    std::map<std::string, int64_t> peaks;
    for (const auto& s : one_axis()) {
      auto counter = std::make_shared<AllocationCounter>();
      c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
      FsdpContext ctx(mesh.device());
      Stack model(8, kWidth);
      shard_stack(model, ctx, mesh, s.placements);
      counter->peak = counter->now;
      for (int step = 0; step < 2; ++step)
        for (bool last : {false, true}) {
          auto scope = microbatch(ctx, last);
          model(torch::ones({2, kWidth})).sum().backward();
        }
      peaks[s.name] = counter->peak;
    }
    EXPECT_LT(peaks["zero3"], peaks["zero2"]);
    EXPECT_LT(peaks["zero2"], peaks["zero1"]);
  });
}

struct ThreeImpl : torch::nn::Module {
  std::vector<LinearUnit> units;
  ThreeImpl() {
    for (const auto* name : {"a", "b", "c"}) units.push_back(register_module(name, LinearUnit(4)));
    fill_by_formula(*this);
  }
  torch::Tensor forward(torch::Tensor x, std::vector<int64_t> order) {
    for (auto i : order) x = x + units[static_cast<size_t>(i)](x);
    return x;
  }
};
FSDP_MODULE(Three);

// faults B26: the order changes from step to step; nothing stays gathered and nothing is stale.
TEST(Memory, B26_ChangingOrders) {
  const std::vector<std::vector<int64_t>> orders{{0, 1, 2}, {0, 2}, {2, 0, 1}, {0}, {0, 1, 2}, {1}, {2, 1, 0}};
  const int64_t payload = 4 * 4 + 4;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    Three reference;
    torch::optim::SGD expected(reference->parameters(), 0.1);
    std::vector<double> losses;
    for (size_t s = 0; s < orders.size(); ++s) {
      expected.zero_grad();
      double total = 0;
      for (int64_t r = 0; r < 2; ++r) {
        const auto x = wave({2, 4}, 1.0 + static_cast<double>(s) + 0.3 * static_cast<double>(r));
        torch::AutoGradMode grad(s != 3);
        auto loss = reference(x, orders[s]).pow(2).mean() / 2;
        if (s != 3) loss.backward();
        total += loss.item<double>();
      }
      expected.step();
      losses.push_back(total);
    }
    for (auto order : {PrefetchOrder::kRegistration, PrefetchOrder::kRecorded})
      for (auto hooks : {ExecutionHooks::kAuto, ExecutionHooks::kOperator})
        for (auto budget : {std::optional<int64_t>(), std::optional<int64_t>(0), std::optional<int64_t>(payload),
                            std::optional<int64_t>(2 * payload)}) {
          FsdpContext ctx(mesh.device(), {}, {}, order);
          Three model;
          {
            auto scope = fully_shard_context(ctx);
            const SchedulePolicy schedule{
                .forward_prefetch_size = budget, .backward_prefetch_size = budget, .hooks = hooks};
            for (auto& u : model->units) fully_shard(u, mesh, zero3("dp"), {}, 1.0, schedule);
            fully_shard(model, mesh, zero3("dp"), {}, 1.0, schedule);
          }
          torch::optim::SGD optimizer(fsdp::parameters(*model), 0.1);
          for (size_t s = 0; s < orders.size(); ++s) {
            optimizer.zero_grad();
            ctx.reset_peak_memory();
            const auto x = wave({2, 4}, 1.0 + static_cast<double>(s) + 0.3 * static_cast<double>(mesh.rank()));
            double value;
            if (s == 3) {
              torch::NoGradGuard no_grad;
              auto forward = forward_scope(ctx);
              value = model(x, orders[s]).pow(2).mean().item<double>();
            } else {
              auto loss = model(x, orders[s]).pow(2).mean();
              loss.backward();
              value = loss.item<double>();
              optimizer.step();
            }
            EXPECT_NEAR(mean_over_ranks(mesh, value), losses[s], 1e-6) << "step " << s;
            if (hooks == ExecutionHooks::kAuto || s != 3) {
              expect_at_rest(*model);
              EXPECT_EQ(ctx.transient_memory().bytes, 0) << "step " << s;
            }
            // Weights of this unit and those ahead, and one gradient with its reduced part.
            const int64_t units = 1 + (budget ? *budget / payload : 1);
            EXPECT_LE(ctx.transient_memory().peak_bytes, (units + 2) * payload * 4) << "step " << s;
          }
        }
  });
}

struct RoutedImpl : torch::nn::Module {
  std::vector<LinearUnit> experts;
  RoutedImpl() {
    for (const auto* name : {"e0", "e1"}) experts.push_back(register_module(name, LinearUnit(4)));
    fill_by_formula(*this);
  }
  torch::Tensor forward(torch::Tensor x, int64_t expert) { return experts[static_cast<size_t>(expert)](x); }
};
FSDP_MODULE(Routed);

// faults B24: ranks that use different units end in an error that names one, under every strategy; no rank steps.
TEST(Memory, B24_RoutingThatDiffersBetweenRanks) {
  for (const auto& s : one_axis())
    EXPECT_THAT(thrown<CommError>([&] {
                  on_mesh(
                      {2},
                      [&](const DeviceMesh& mesh) {
                        FsdpContext ctx(mesh.device());
                        Routed model;
                        {
                          auto scope = fully_shard_context(ctx);
                          const SchedulePolicy schedule{.forward_prefetch_size = 0};
                          for (auto& e : model->experts) fully_shard(e, mesh, s.placements, {}, 1.0, schedule);
                          fully_shard(model, mesh, s.placements, {}, 1.0, schedule);
                        }
                        model(torch::ones({1, 4}), mesh.rank()).sum().backward();
                        ADD_FAILURE() << "backward went through under " << s.name;
                      },
                      3'000);
                }),
                HasSubstr("'e"))
        << s.name;
}

// Units under no common root are told apart, though each is called "": equal sizes must not let ranks mix them up.
TEST(Memory, RootsInAnotherOrderAreNoticed) {
  EXPECT_THAT(thrown<CommError>([] {
                on_mesh(
                    {2},
                    [](const DeviceMesh& mesh) {
                      FsdpContext ctx(mesh.device());
                      LinearUnit a(4), b(4);
                      for (auto& m : std::vector<LinearUnit>{a, b}) fill_by_formula(*m);
                      {
                        auto scope = fully_shard_context(ctx);
                        const SchedulePolicy schedule{.forward_prefetch_size = 0, .backward_prefetch_size = 0};
                        for (auto& m : std::vector<LinearUnit>{a, b})
                          fully_shard(m, mesh, zero3("dp"), {}, 1.0, schedule);
                      }
                      EXPECT_EQ(get_fsdp_module(*b)->name(), "");
                      auto x = torch::ones({1, 4});
                      auto& first = mesh.rank() == 0 ? a : b;
                      auto& second = mesh.rank() == 0 ? b : a;
                      second(first(x)).sum().backward();
                    },
                    3'000);
              }),
              HasSubstr("(root 1)"));
}

}  // namespace
}  // namespace fsdp::testing
