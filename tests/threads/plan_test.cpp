/// fsdp-plan's figures against what a run measures: bytes at rest and collectives exactly, the transient peak within
/// 5%.
#include <map>
#include <sstream>
#include <tuple>

#include <fsdp/distributed/simulated_world.h>

#include "plan/figures.h"
#include "plan/strategy.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kBlocks = 3;

/// A root whose parameters are used first and last, around equal blocks. By default no shape divides evenly among the
/// ranks.
struct TowerImpl : torch::nn::Module {
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  TowerImpl(int64_t width, int64_t hidden) {
    in = register_module("in", torch::nn::Linear(5, width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(Block(width, hidden));
    out = register_module("out", torch::nn::Linear(width, 3));
    fill_by_formula(*this);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = in(x);
    for (auto& b : *blocks) x = x + b->as<Block>()->forward(x);
    return out(x);
  }
};
FSDP_MODULE(Tower);

plan::Unit unit_of(const std::string& name, const torch::nn::Module& module, int64_t count) {
  plan::Unit unit{.name = name, .count = count};
  for (const auto& p : module.named_parameters())
    unit.tensors.push_back({p.key(), p.value().sizes().vec(), plan::Dtype::kFloat32});
  return unit;
}

plan::Model model_of(Tower tower) {
  auto root = unit_of("root", *tower, 1);
  root.root = true;
  std::erase_if(root.tensors, [](const auto& t) { return t.name.starts_with("blocks"); });
  return {"tower", {root, unit_of("block", *tower->blocks[0], kBlocks)}, {}};
}

struct Case {
  std::string strategy;
  std::vector<int64_t> mesh;
  bool bf16 = false;
  bool bf16_wire = false;
  bool unpadded = false;
  bool keep = false;         // reshard_after_forward = false
  bool reduce_last = false;  // kLastMicrobatch
  int64_t microbatches = 1;
  int64_t width = 6, hidden = 11;

  std::string name() const {
    std::ostringstream s;
    s << strategy << " on";
    for (auto n : mesh) s << ' ' << n;
    if (bf16) s << ", bf16";
    if (bf16_wire) s << ", bf16 on the wire";
    if (unpadded) s << ", unpadded";
    if (keep) s << ", kept after forward";
    if (reduce_last) s << ", reduced last";
    s << ", " << microbatches << " microbatches";
    return s.str();
  }

  plan::Options options() const {
    plan::Options o;
    o.mesh = plan::make_mesh(mesh);
    o.placements = plan::parse_strategy(strategy, o.mesh);
    if (bf16) o.precision.param = plan::Dtype::kBFloat16;
    if (bf16_wire) o.precision.comm = plan::Dtype::kBFloat16;
    if (unpadded) o.layout = plan::Options::Layout::kUnpadded;
    o.reshard_after_forward = !keep;
    o.reduce_last = reduce_last;
    o.microbatches = microbatches;
    return o;
  }
};

/// What one rank's run came to.
struct Measured {
  int64_t main_weights = 0, model_weights = 0, gradients = 0, persistent = 0, optimizer_state = 0, peak = 0;
  std::map<std::tuple<std::string, std::string, std::string>, std::tuple<int64_t, int64_t, int64_t>> traffic;
};

Measured run(const Case& c, const DeviceMesh& mesh, const Placements& placements) {
  Tower tower(c.width, c.hidden);
  FsdpContext ctx(mesh.device(), {.grad_reduction = c.reduce_last ? RuntimePolicy::GradReduction::kLastMicrobatch
                                                                  : RuntimePolicy::GradReduction::kEveryMicrobatch});
  MixedPrecisionPolicy precision;
  if (c.bf16) precision.param_dtype = at::kBFloat16;
  if (c.bf16_wire) precision.grad_comm_dtype = at::kBFloat16;
  {
    auto scope = fully_shard_context(ctx);
    auto shard = [&](torch::nn::Module& m) {
      fully_shard(m, mesh, placements, precision, 1.0, {.reshard_after_forward = !c.keep},
                  c.unpadded ? ShardLayout::kUnpadded : ShardLayout::kPadded);
    };
    for (auto& b : *tower->blocks) shard(*b);
    shard(*tower);
  }
  torch::optim::Adam adam(fsdp::parameters(*tower), torch::optim::AdamOptions(1e-3));
  CollectiveLog log(mesh.world());
  for (int64_t step = 0; step < 3; ++step) {
    log.clear();
    adam.zero_grad();
    for (int64_t m = 0; m < c.microbatches; ++m) {
      auto scope = microbatch(ctx, m == c.microbatches - 1);
      auto x = wave({2, 5}, 1.0 + static_cast<double>(step + m)).to(c.bf16 ? at::kBFloat16 : at::kFloat);
      tower(x).sum().backward();
    }
    adam.step();
  }
  Measured result;
  for (const auto& r : log.records()) {
    auto& [calls, elements, bytes] = result.traffic[{r.axes, r.operation, c10::toString(r.dtype)}];
    calls += 1;
    elements += r.elements;
    bytes += r.elements * static_cast<int64_t>(c10::elementSize(r.dtype));
  }
  auto bytes = [](const DBuffer& b) { return static_cast<int64_t>(b.local_buffer().nbytes()); };
  for (const auto& m : tower->modules()) {
    auto* unit = get_fsdp_module(*m);
    if (!unit) continue;
    for (const auto* group : unit->parameter_groups()) {
      result.main_weights += bytes(group->main_weight());
      result.model_weights += bytes(group->model_weight());
      result.gradients += bytes(group->main_grad());
      result.persistent += group->persistent_bytes();
    }
  }
  for (const auto& [key, state] : adam.state()) {
    const auto& s = static_cast<const torch::optim::AdamParamState&>(*state);
    result.optimizer_state += static_cast<int64_t>(s.exp_avg().nbytes() + s.exp_avg_sq().nbytes());
  }
  result.peak = ctx.transient_memory().peak_bytes;
  return result;
}

const char* torch_name(plan::Dtype dtype) { return dtype == plan::Dtype::kBFloat16 ? "BFloat16" : "Float"; }

plan::Plan plan_of(const Case& c) { return plan::make_plan(model_of(Tower(c.width, c.hidden)), c.options()); }

void compare(const Case& c, const plan::Plan& plan, const DeviceMesh& mesh) {
  const auto measured = run(c, mesh, plan.options.placements);
  const auto planned = plan::figures(plan, mesh.rank());
  std::ostringstream text;
  text << c.name() << ", rank " << mesh.rank();
  const auto where = text.str();
  EXPECT_EQ(measured.main_weights, planned.rest.main_weights) << where;
  EXPECT_EQ(measured.model_weights, planned.rest.model_weights) << where;
  EXPECT_EQ(measured.gradients, planned.rest.gradients) << where;
  EXPECT_EQ(measured.persistent, planned.rest.library()) << where;
  EXPECT_EQ(measured.optimizer_state, planned.rest.optimizer_state) << where;
  std::map<std::tuple<std::string, std::string, std::string>, std::tuple<int64_t, int64_t, int64_t>> expected;
  for (const auto& t : planned.traffic)
    expected[{plan.options.mesh.axes[t.axis], t.operation, torch_name(t.dtype)}] = {t.calls, t.elements, t.bytes};
  EXPECT_THAT(measured.traffic, ::testing::ContainerEq(expected)) << where;
  EXPECT_EQ(measured.peak, planned.peak.library_bytes) << where;
}

void expect_as_planned(const Case& c) {
  const auto plan = plan_of(c);
  on_mesh(c.mesh, [&](const DeviceMesh& mesh) { compare(c, plan, mesh); });
}

TEST(PlanAndRun, EveryStrategyAndPrecision) {
  for (bool bf16 : {false, true}) {
    for (int64_t ranks : {2, 4})
      for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"})
        expect_as_planned({.strategy = strategy, .mesh = {ranks}, .bf16 = bf16});
    for (const char* strategy : {"hsdp", "hfsdp"})
      expect_as_planned({.strategy = strategy, .mesh = {2, 2}, .bf16 = bf16});
  }
  expect_as_planned({.strategy = "zero3", .mesh = {8}});
  expect_as_planned({.strategy = "hfsdp", .mesh = {2, 4}});
}

TEST(PlanAndRun, Microbatches) {
  for (int64_t microbatches : {2, 3}) {
    for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"})
      expect_as_planned({.strategy = strategy, .mesh = {2}, .bf16 = true, .microbatches = microbatches});
    for (const char* strategy : {"hsdp", "hfsdp"})
      expect_as_planned({.strategy = strategy, .mesh = {2, 2}, .bf16 = true, .microbatches = microbatches});
  }
}

TEST(PlanAndRun, GradientsOnTheWire) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"})
    expect_as_planned({.strategy = strategy, .mesh = {2}, .bf16_wire = true, .microbatches = 2});
  for (const char* strategy : {"hsdp", "hfsdp"})
    expect_as_planned({.strategy = strategy, .mesh = {2, 2}, .bf16_wire = true, .microbatches = 2});
}

// Rows of 96 and 140 elements, or of 640 and 32, divide badly together: each block gets several buffers.
TEST(PlanAndRun, DividedGroups) {
  struct Mesh {
    std::string strategy;
    std::vector<int64_t> shape;
    int64_t width, hidden;
  };
  for (const auto& m : std::vector<Mesh>{{"zero1", {5}, 640, 32},
                                         {"zero2", {5}, 640, 32},
                                         {"zero3", {5}, 640, 32},
                                         {"zero3", {8}, 96, 140},
                                         {"hsdp", {2, 4}, 96, 140},
                                         {"hfsdp", {2, 4}, 96, 140}})
    for (const bool bf16 : {false, true}) {
      const Case c{.strategy = m.strategy,
                   .mesh = m.shape,
                   .bf16 = bf16,
                   .microbatches = 2,
                   .width = m.width,
                   .hidden = m.hidden};
      EXPECT_GT(plan_of(c).units[1].groups.size(), 1u) << c.name();
      expect_as_planned(c);
    }
}

TEST(PlanAndRun, UnpaddedShardsOfEveryRank) {
  for (const char* strategy : {"zero1", "zero2", "zero3"})
    expect_as_planned({.strategy = strategy, .mesh = {3}, .unpadded = true});
  for (const char* strategy : {"hsdp", "hfsdp"})
    expect_as_planned({.strategy = strategy, .mesh = {2, 2}, .unpadded = true});
}

TEST(PlanAndRun, Schedules) {
  for (const char* strategy : {"zero3", "zero2"}) {
    expect_as_planned({.strategy = strategy, .mesh = {2}, .keep = true, .microbatches = 2});
    expect_as_planned({.strategy = strategy, .mesh = {2}, .reduce_last = true, .microbatches = 3});
  }
  expect_as_planned({.strategy = "hfsdp", .mesh = {2, 2}, .keep = true, .reduce_last = true, .microbatches = 2});
}

TEST(PlanAndRun, OtherTriples) {
  expect_as_planned({.strategy = "R,S,R", .mesh = {2}, .microbatches = 2});
  expect_as_planned({.strategy = "S,R,R", .mesh = {2}, .bf16 = true});
  expect_as_planned({.strategy = "RR,PS,SS", .mesh = {2, 2}, .microbatches = 2});
  expect_as_planned({.strategy = "SS,SS,SS", .mesh = {2, 2}, .bf16 = true});
  expect_as_planned({.strategy = "RS,PS,SS", .mesh = {4, 1}});
  expect_as_planned({.strategy = "RS,PS,SS", .mesh = {1, 4}});
}

// One rank, alone in its process, of jobs that this machine could not run.
TEST(PlanAndRun, OneRankOfManyThousand) {
  for (const auto& [strategy, shape] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
           {"hfsdp", {8, 128}}, {"hsdp", {8, 128}}, {"zero3", {1024}}, {"zero1", {16384}}})
    for (bool unpadded : {false, true}) {
      const Case c{.strategy = strategy,
                   .mesh = shape,
                   .bf16 = true,
                   .unpadded = unpadded,
                   .microbatches = 2,
                   .width = 64,
                   .hidden = 2048};
      const auto plan = plan_of(c);
      const auto ranks = plan.options.mesh.size();
      for (int64_t rank : {int64_t{0}, ranks / 2 + 5, ranks - 1}) {
        auto world = simulate_world(rank, ranks);
        world->barrier();
        compare(c, plan, init_device_mesh(world, shape, plan.options.mesh.axes));
      }
    }
}

TEST(SimulatedWorld, RefusesRanksThatItDoesNotHave) {
  EXPECT_THAT(thrown<ValueError>([] { simulate_world(8, 8); }), ::testing::HasSubstr("0 to 7, got 8"));
  EXPECT_THAT(thrown<ValueError>([] { simulate_world(-1, 8); }), ::testing::HasSubstr("got -1"));
}

}  // namespace
}  // namespace fsdp::testing
