/// fsdp-plan's figures, by hand for small models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>

#include "fsdp_plan/arguments.h"
#include "json/json.h"
#include "plan/figures.h"
#include "plan/fit.h"
#include "plan/model_readers.h"
#include "plan/picture.h"
#include "plan/report.h"
#include "plan/strategy.h"
#include "zoo/model_zoo.h"

namespace fsdp::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Three units of 48 elements in rows of 4: without padding on four ranks, 12 elements each.
Model three_units() {
  return {"three", {{"u", 3, false, false, {{"w", {8, 4}, Dtype::kFloat32}, {"v", {4, 4}, Dtype::kFloat32}}}}, {}};
}

Options options_of(const std::string& strategy, std::vector<int64_t> shape) {
  Options o;
  o.mesh = make_mesh(std::move(shape));
  o.placements = parse_strategy(strategy, o.mesh);
  return o;
}

Figures figures_of(const std::string& strategy, std::vector<int64_t> shape, const Precision& precision = {},
                   int64_t microbatches = 1) {
  auto o = options_of(strategy, std::move(shape));
  o.precision = precision;
  o.microbatches = microbatches;
  return figures(make_plan(three_units(), o), 0);
}

/// "dp all_gather float32: 3 calls, 144 elements, 576 bytes, 432 sent"
std::vector<std::string> lines(const Figures& f, const std::vector<std::string>& axes) {
  std::vector<std::string> result;
  for (const auto& t : f.traffic)
    result.push_back(axes[t.axis] + " " + t.operation + " " + name_of(t.dtype) + ": " + std::to_string(t.calls) +
                     " calls, " + std::to_string(t.elements) + " elements, " + std::to_string(t.bytes) + " bytes, " +
                     std::to_string(t.sent) + " sent");
  return result;
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const ValueError& e) {
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(Plan, Ddp) {
  const auto f = figures_of("ddp", {4});
  EXPECT_EQ(f.rest.main_weights, 3 * 48 * 4);
  EXPECT_EQ(f.rest.weights, 3 * 48 * 4);  // compute weights are the same memory
  EXPECT_EQ(f.rest.gradients, 3 * 48 * 4);
  EXPECT_EQ(f.rest.optimizer_state, 2 * 3 * 48 * 4);
  EXPECT_THAT(lines(f, {"dp"}), ElementsAre("dp all_reduce float32: 3 calls, 144 elements, 576 bytes, 864 sent"));
  // Autograd's gradients of one unit; they are added where the optimizer reads them.
  EXPECT_EQ(f.peak.library_bytes, 0);
  EXPECT_EQ(f.peak.at.total(), 48 * 4);
}

TEST(Plan, Zero1) {
  const auto f = figures_of("zero1", {4});
  EXPECT_EQ(f.rest.main_weights, 3 * 12 * 4);
  EXPECT_EQ(f.rest.model_weights, 3 * 48 * 4);
  EXPECT_EQ(f.rest.weights, 3 * 48 * 4);  // the shard is a part of the whole
  EXPECT_EQ(f.rest.gradients, 3 * 12 * 4);
  EXPECT_EQ(f.rest.optimizer_state, 2 * 3 * 12 * 4);
  EXPECT_THAT(lines(f, {"dp"}), ElementsAre("dp all_gather float32: 3 calls, 144 elements, 576 bytes, 432 sent",
                                            "dp reduce_scatter float32: 3 calls, 144 elements, 576 bytes, 432 sent"));
  // One unit's whole gradients wait for their reduction while autograd makes those of the next.
  EXPECT_EQ(f.peak.library_bytes, 48 * 4);
  EXPECT_EQ(f.peak.at.total(), 2 * 48 * 4);
}

TEST(Plan, Zero1KeepsWholeGradientsBetweenMicrobatches) {
  const auto f = figures_of("zero1", {4}, {}, 2);
  EXPECT_EQ(f.peak.at.accumulators, 3 * 48 * 4);
  EXPECT_EQ(f.peak.at.total(), 4 * 48 * 4);
  EXPECT_EQ(sum(f.traffic).calls, 3 + 3);  // weights and gradients once per step
}

TEST(Plan, Zero2) {
  const auto f = figures_of("zero2", {4}, {}, 2);
  EXPECT_EQ(f.rest.weights, 3 * 48 * 4);
  EXPECT_EQ(f.rest.gradients, 3 * 12 * 4);
  EXPECT_THAT(lines(f, {"dp"}), ElementsAre("dp all_gather float32: 3 calls, 144 elements, 576 bytes, 432 sent",
                                            "dp reduce_scatter float32: 6 calls, 288 elements, 1152 bytes, 864 sent"));
  EXPECT_EQ(f.peak.library_bytes, 48 * 4);
  EXPECT_EQ(f.peak.at.total(), 2 * 48 * 4);
}

TEST(Plan, Zero3) {
  const auto f = figures_of("zero3", {4});
  EXPECT_EQ(f.rest.weights, 3 * 12 * 4);
  EXPECT_EQ(f.rest.gradients, 3 * 12 * 4);
  EXPECT_EQ(f.rest.optimizer_state, 2 * 3 * 12 * 4);
  EXPECT_EQ(f.rest.total(), 4 * 3 * 12 * 4);
  EXPECT_THAT(lines(f, {"dp"}), ElementsAre("dp all_gather float32: 6 calls, 288 elements, 1152 bytes, 864 sent",
                                            "dp reduce_scatter float32: 3 calls, 144 elements, 576 bytes, 432 sent"));
  // Two units gathered, the gradients of the one behind under way, those of the one at work growing.
  EXPECT_EQ(f.peak.at.weights, 2 * 48 * 4);
  EXPECT_EQ(f.peak.at.packed, 48 * 4);
  EXPECT_EQ(f.peak.at.gradients, 48 * 4);
  EXPECT_EQ(f.peak.where, "backward of u 1");
  EXPECT_EQ(f.peak.library_bytes, 3 * 48 * 4);
}

TEST(Plan, Hsdp) {
  const auto f = figures_of("hsdp", {2, 2});
  EXPECT_EQ(f.rest.weights, 3 * 24 * 4);
  EXPECT_EQ(f.rest.gradients, 3 * 24 * 4);
  EXPECT_EQ(f.rest.optimizer_state, 2 * 3 * 24 * 4);
  EXPECT_THAT(lines(f, {"outer", "inner"}),
              ElementsAre("outer all_reduce float32: 3 calls, 72 elements, 288 bytes, 288 sent",
                          "inner all_gather float32: 6 calls, 288 elements, 1152 bytes, 576 sent",
                          "inner reduce_scatter float32: 3 calls, 144 elements, 576 bytes, 288 sent"));
}

TEST(Plan, Hfsdp) {
  const auto f = figures_of("hfsdp", {2, 2});
  EXPECT_EQ(f.rest.main_weights, 3 * 12 * 4);
  EXPECT_EQ(f.rest.model_weights, 3 * 24 * 4);
  EXPECT_EQ(f.rest.weights, 3 * 24 * 4);
  EXPECT_EQ(f.rest.gradients, 3 * 12 * 4);
  EXPECT_EQ(f.rest.optimizer_state, 2 * 3 * 12 * 4);
  EXPECT_THAT(lines(f, {"outer", "inner"}),
              ElementsAre("outer all_gather float32: 3 calls, 72 elements, 288 bytes, 144 sent",
                          "outer reduce_scatter float32: 3 calls, 72 elements, 288 bytes, 144 sent",
                          "inner all_gather float32: 6 calls, 288 elements, 1152 bytes, 576 sent",
                          "inner reduce_scatter float32: 3 calls, 144 elements, 576 bytes, 288 sent"));
  // Between microbatches the gradients stay sharded over the inner axis only.
  EXPECT_EQ(figures_of("hfsdp", {2, 2}, {}, 2).peak.at.accumulators, 3 * 24 * 4);
  // The triple that the name stands for.
  EXPECT_EQ(lines(figures_of("RS,PS,SS", {2, 2}), {"o", "i"}), lines(f, {"o", "i"}));
}

TEST(Plan, MixedPrecision) {
  const Precision half{.param = Dtype::kBFloat16, .main = Dtype::kFloat32, .grad = {}, .comm = {}};
  const auto zero3 = figures_of("zero3", {4}, half);
  EXPECT_EQ(zero3.rest.main_weights, 3 * 12 * 4);
  EXPECT_EQ(zero3.rest.model_weights, 3 * 12 * 2);
  EXPECT_EQ(zero3.rest.weights, 3 * 12 * (4 + 2));
  EXPECT_EQ(zero3.rest.gradients, 3 * 12 * 4);  // of the model's own dtype
  EXPECT_THAT(lines(zero3, {"dp"}),
              ElementsAre("dp all_gather bfloat16: 6 calls, 288 elements, 576 bytes, 432 sent",
                          "dp reduce_scatter bfloat16: 3 calls, 144 elements, 288 bytes, 216 sent"));
  EXPECT_EQ(zero3.peak.library_bytes, 3 * 48 * 2);
  // zero1 adds up in the optimizer's dtype and reduces that, unless another is asked for.
  EXPECT_EQ(figures_of("zero1", {4}, half).traffic.back().dtype, Dtype::kFloat32);
  auto wire = half;
  wire.comm = Dtype::kBFloat16;
  const auto zero1 = figures_of("zero1", {4}, wire);
  EXPECT_EQ(zero1.traffic.back().dtype, Dtype::kBFloat16);
  EXPECT_EQ(zero1.peak.library_bytes, 48 * 4 + 48 * 2);  // the sum, and its cast for the wire
}

TEST(Plan, ADtypeIsTheModelsWhereThePolicyLeavesIt) {
  Model model{"m", {{"u", 1, false, false, {{"w", {8, 2}, Dtype::kBFloat16}, {"d", {8}, Dtype::kFloat64}}}}, {}};
  auto o = options_of("zero3", {2});
  const auto rest = at_rest(make_plan(model, o), 0);
  // Two groups: bfloat16 with float32 weights behind it; float64 keeps its precision.
  EXPECT_EQ(rest.main_weights, 8 * 4 + 4 * 8);
  EXPECT_EQ(rest.weights, 8 * (4 + 2) + 4 * 8);
  EXPECT_EQ(rest.gradients, 8 * 2 + 4 * 8);
  o.precision.main.reset();
  EXPECT_EQ(at_rest(make_plan(model, o), 0).main_weights, 8 * 2 + 4 * 8);
}

TEST(Plan, FrozenUnitsHaveWeightsOnly) {
  auto model = three_units();
  model.units[0].frozen = true;
  const auto f = figures(make_plan(model, options_of("zero3", {4})), 0);
  EXPECT_EQ(f.rest.total(), 3 * 12 * 4);
  ASSERT_EQ(f.traffic.size(), 1u);
  EXPECT_EQ(f.traffic[0].operation, "all_gather");
  EXPECT_EQ(f.peak.at.packed + f.peak.at.gradients, 0);
}

TEST(Plan, ARootStaysGathered) {
  Model model{"m",
              {{"root", 1, true, false, {{"table", {8, 4}, Dtype::kFloat32}}},
               {"u", 4, false, false, {{"w", {8, 2}, Dtype::kFloat32}}}},
              {}};
  const auto f = figures(make_plan(model, options_of("zero3", {4})), 0);
  EXPECT_EQ(f.peak.at.weights, (32 + 2 * 16) * 4);
  EXPECT_EQ(f.peak.at.gradients, (32 + 16) * 4);
  EXPECT_EQ(sum(f.traffic).calls, 5 * 3);
}

TEST(Plan, KeepingWeightsAfterForwardSavesGathers) {
  auto o = options_of("zero3", {4});
  o.reshard_after_forward = false;
  const auto f = figures(make_plan(three_units(), o), 0);
  EXPECT_EQ(f.traffic[0].calls, 3);
  EXPECT_EQ(f.peak.at.weights, 3 * 48 * 4);
}

TEST(Plan, ReducingLastSavesReductions) {
  auto o = options_of("zero3", {4});
  o.microbatches = 5;
  EXPECT_EQ(figures(make_plan(three_units(), o), 0).traffic.back().calls, 15);
  o.reduce_last = true;
  const auto f = figures(make_plan(three_units(), o), 0);
  EXPECT_EQ(f.traffic.back().calls, 3);
  EXPECT_EQ(f.peak.at.accumulators, 3 * 48 * 4);
}

TEST(Plan, UnpaddedShardsDiffer) {
  Model model{"m", {{"u", 1, false, false, {{"w", {5, 3}, Dtype::kFloat32}}}}, {}};
  auto o = options_of("zero3", {2});
  // Padded, three rows on one rank and two on the other: shards of 9, 3 elements of padding.
  const auto padded = make_plan(model, o);
  EXPECT_EQ(padded.padding(), 3);
  EXPECT_EQ(at_rest(padded, 0).weights, 9 * 4);
  EXPECT_EQ(at_rest(padded, 1).weights, 9 * 4);
  EXPECT_EQ(at_rest(padded, 0).optimizer_state + at_rest(padded, 1).optimizer_state, 2 * 15 * 4);
  EXPECT_EQ(traffic(padded, 0)[0].elements, 2 * 18);
  o.layout = Options::Layout::kUnpadded;
  const auto plan = make_plan(model, o);
  EXPECT_EQ(plan.padding(), 0);
  EXPECT_EQ(at_rest(plan, 0).weights, 6 * 4);
  EXPECT_EQ(at_rest(plan, 1).weights, 9 * 4);
  EXPECT_EQ(largest_rank(plan), 1);
  EXPECT_EQ(traffic(plan, 0)[0].elements, 2 * 15);
  o.block = 4;  // four rows, and the last
  EXPECT_EQ(at_rest(make_plan(model, o), 0).weights, 12 * 4);
}

TEST(Plan, TensorAtomicSpreadsTheTensorsOfAllUnits) {
  Model model{"m", {{"u", 4, false, false, {{"w", {6, 2}, Dtype::kFloat32}}}}, {}};
  auto o = options_of("zero3", {2});
  o.layout = Options::Layout::kTensorAtomic;
  const auto plan = make_plan(model, o);
  ASSERT_EQ(plan.units.size(), 4u);
  EXPECT_EQ(plan.units[3].name, "u 3");
  for (int64_t rank : {0, 1}) EXPECT_EQ(at_rest(plan, rank).weights, 2 * 12 * 4) << rank;
  auto two = options_of("hsdp", {2, 2});
  two.layout = Options::Layout::kTensorAtomic;
  EXPECT_THAT(error_of([&] { make_plan(model, two); }), HasSubstr("the mesh has 2 axes"));
  o.block = 2;
  EXPECT_THAT(error_of([&] { make_plan(model, o); }), HasSubstr("takes no block size"));
}

TEST(Plan, AxesOfOneRankCostNothing) {
  const auto f = figures_of("hfsdp", {4, 1});
  EXPECT_EQ(lines(f, {"outer", "inner"}),
            (std::vector<std::string>{"outer all_gather float32: 3 calls, 144 elements, 576 bytes, 432 sent",
                                      "outer reduce_scatter float32: 3 calls, 144 elements, 576 bytes, 432 sent"}));
  EXPECT_TRUE(figures_of("zero3", {1}).traffic.empty());
  EXPECT_EQ(figures_of("zero3", {1}).peak.at.weights, 0);
}

TEST(Plan, EveryRankAddsUpToTheModel) {
  for (const char* strategy : {"zero3", "zero2", "zero1"})
    for (auto layout : {Options::Layout::kPadded, Options::Layout::kUnpadded, Options::Layout::kTensorAtomic}) {
      auto o = options_of(strategy, {6});
      o.layout = layout;
      const auto plan = make_plan(zoo_model("resnet50", Dtype::kFloat32), o);
      int64_t state = 0, gradients = 0;
      for (int64_t r = 0; r < 6; ++r) {
        state += at_rest(plan, r).optimizer_state;
        gradients += at_rest(plan, r).gradients;
      }
      EXPECT_EQ(state, 2 * 4 * 25'557'032);
      EXPECT_EQ(gradients, 4 * (25'557'032 + plan.padding()));
    }
}

TEST(Plan, ManyRanks) {
  for (const auto& m : zoo::models()) {
    const auto plan = make_plan(zoo_model(m.name, Dtype::kBFloat16), options_of("zero3", {131072}));
    const auto f = figures(plan, largest_rank(plan));
    const auto all = plan.parameters() + plan.padding();
    EXPECT_EQ(f.rest.weights, all / 131072 * (4 + 2)) << m.name;
    EXPECT_EQ(f.traffic[0].elements, 2 * all) << m.name;
  }
  auto o = options_of("hfsdp", {1024, 128});
  o.layout = Options::Layout::kUnpadded;
  const auto plan = make_plan(zoo_model("DeepSeek V3", Dtype::kBFloat16), o);
  EXPECT_EQ(plan.padding(), 0);
  const auto f = figures(plan, largest_rank(plan));
  EXPECT_GE(f.rest.optimizer_state, 2 * 4 * plan.parameters() / 131072);
}

TEST(Plan, RefusesRanksAndOptionsOutOfRange) {
  auto o = options_of("zero3", {4});
  const auto plan = make_plan(three_units(), o);
  EXPECT_THAT(error_of([&] { figures(plan, 4); }), HasSubstr("expected 0 to 3, got 4"));
  o.microbatches = 0;
  EXPECT_THAT(error_of([&] { make_plan(three_units(), o); }), HasSubstr("microbatches: expected 1 to 1024, got 0"));
  Model vast{"vast", {{"u", 1000, false, false, {{"w", {int64_t{1} << 40}, Dtype::kFloat32}}}}, {}};
  EXPECT_THAT(error_of([&] { make_plan(vast, options_of("zero3", {4})); }), HasSubstr("more than 2^48 elements"));
  EXPECT_THAT(error_of([] { make_mesh({1 << 12, 1 << 12}); }), HasSubstr("at most 1048576 ranks"));
  EXPECT_THAT(error_of([] { make_mesh({0}); }), HasSubstr("at least one rank"));
  EXPECT_THAT(error_of([] { parse_mesh("8x"); }), HasSubstr("\"8x\""));
  EXPECT_THAT(error_of([] { parse_mesh("2x2x2"); }), HasSubstr("got 3"));
  EXPECT_EQ(parse_mesh("8x64").shape, (std::vector<int64_t>{8, 64}));
}

TEST(Strategy, SaysWhichFitTheMesh) {
  const auto one = make_mesh({4}), two = make_mesh({2, 2});
  EXPECT_THAT(error_of([&] { parse_strategy("hsdp", one); }), HasSubstr("ddp, zero1, zero2, zero3"));
  EXPECT_THAT(error_of([&] { parse_strategy("zero3", two); }), HasSubstr("hsdp, hfsdp"));
  EXPECT_THAT(error_of([&] { parse_strategy("R,P", one); }), HasSubstr("three words"));
  EXPECT_THAT(error_of([&] { parse_strategy("R,P,S", two); }), HasSubstr("each of the mesh's 2 axes"));
  EXPECT_THAT(error_of([&] { parse_strategy("R,X,S", one); }), HasSubstr("'X'"));
  // What fully_shard refuses is refused here too.
  EXPECT_THAT(error_of([&] { make_plan(three_units(), options_of("SR,SR,SR", {2, 2})); }), HasSubstr("innermost"));
  EXPECT_THAT(error_of([&] { make_plan(three_units(), options_of("P,P,R", {2})); }), HasSubstr("never partial"));
}

TEST(ModelReaders, Zoo) {
  EXPECT_EQ(zoo_model("llama-3-8b", Dtype::kFloat32).name, "Llama-3 8B");
  const auto error = error_of([] { zoo_model("llama 4", Dtype::kFloat32); });
  for (const auto& m : zoo::models()) EXPECT_THAT(error, HasSubstr(m.name));
}

TEST(ModelReaders, Json) {
  const auto m = json_model(R"({"name": "n", "dtype": "bf16", "units": [
      {"name": "r", "root": true, "tensors": {"table": [7, 3]}},
      {"name": "b", "count": 5, "dtype": "float32", "frozen": true, "tensors": {"w": [4, 2], "s": [], "e": [3, 0]}}]})",
                            "m.json", {});
  EXPECT_EQ(m.name, "n");
  ASSERT_EQ(m.units.size(), 2u);
  EXPECT_TRUE(m.units[0].root);
  EXPECT_EQ(m.units[0].tensors[0].dtype, Dtype::kBFloat16);
  EXPECT_EQ(m.units[1].count, 5);
  EXPECT_TRUE(m.units[1].frozen);
  EXPECT_EQ(m.units[1].tensors[0].dtype, Dtype::kFloat32);
  EXPECT_EQ(make_plan(m, options_of("zero3", {2})).parameters(), 21 + 5 * 9);
  EXPECT_EQ(json_model(R"({"units": [{"name": "r", "tensors": {"t": [7]}}]})", "m.json", Dtype::kFloat16)
                .units[0]
                .tensors[0]
                .dtype,
            Dtype::kFloat16);
}

TEST(ModelReaders, JsonErrorsSayWhere) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"{\n  \"units\": [x]}", "m.json: JSON, line 2, column 13"},
      {"[]", "m.json: the document: expected an object"},
      {"{}", "expected a member \"units\""},
      {R"({"units": 3})", "units: expected a list of units"},
      {R"({"units": []})", "at least one unit"},
      {R"({"layers": []})", "unknown member \"layers\"; expected \"name\", \"dtype\", \"units\""},
      {R"({"units": [{"tensors": {}}]})", "units[0]: expected a member \"name\""},
      {R"({"units": [{"name": "a", "tensors": {}}]})", "unit \"a\": expected at least one tensor"},
      {R"({"units": [{"name": "a", "count": 0, "tensors": {"w": [1]}}]})", "a count of 1 to 100000, got 0"},
      {R"({"units": [{"name": "a", "count": 1.5, "tensors": {"w": [1]}}]})", "units[0].count: expected an integer"},
      {R"({"units": [{"name": "a", "tensors": {"w": [2, "x"]}}]})", R"(units[0].tensors["w"][1]: expected an integer)"},
      {R"({"units": [{"name": "a", "tensors": {"w": [-2]}}]})", R"(units[0].tensors["w"][0]: expected a dimension)"},
      {R"({"units": [{"name": "a", "tensors": {"w": 3}}]})", R"(units[0].tensors["w"]: expected a shape)"},
      {R"({"units": [{"name": "a", "tensors": {"w": [4294967296, 4294967296]}}]})",
       "tensor \"w\": its elements do not fit in 64 bits"},
      {R"({"units": [{"name": "a", "tensors": {"w": [1], "w": [2]}}]})", "two tensors are called \"w\""},
      {R"({"units": [{"name": "a", "dtype": "int8", "tensors": {"w": [1]}}]})", "units[0].dtype: expected float64"},
      {R"({"units": [{"name": "a", "tensors": {"w": [1]}}, {"name": "b", "root": true, "tensors": {"w": [1]}}]})",
       "unit \"b\": a root lies around all other units"}};
  for (const auto& [text, expected] : cases)
    EXPECT_THAT(error_of([&, t = &text] { json_model(*t, "m.json", {}); }), HasSubstr(expected)) << text;
}

/// A file that begins with the length of `header`, unless another one is given.
std::filesystem::path safetensors_file(const std::string& name, const std::string& header, int64_t length = -1) {
  const auto path = std::filesystem::path(::testing::TempDir()) / (name + ".safetensors");
  std::ofstream out(path, std::ios::binary);
  const auto n = static_cast<uint64_t>(length < 0 ? static_cast<int64_t>(header.size()) : length);
  for (int i = 0; i < 8; ++i) out.put(static_cast<char>(n >> (8 * i)));
  out << header;
  return path;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape) {
  return "\"" + name + "\": {\"dtype\": \"" + dtype + "\", \"shape\": " + shape + ", \"data_offsets\": [0, 0]}";
}

TEST(ModelReaders, Safetensors) {
  const std::vector<std::filesystem::path> files{
      safetensors_file("plan-1", "{\"__metadata__\": {\"format\": \"pt\"}, " +
                                     entry("embed.weight", "BF16", "[10, 4]") + ", " +
                                     entry("layers.10.w", "BF16", "[6, 4]") + ", " +
                                     entry("layers.2.experts.0.w", "BF16", "[4, 4]") + "}"),
      safetensors_file("plan-2", "{" + entry("layers.1.w", "BF16", "[6, 4]") + ", " +
                                     entry("layers.0.w", "BF16", "[6, 4]") + ", " + entry("norm", "F32", "[4]") + ", " +
                                     entry("steps", "I64", "[]") + "}")};
  const auto m = safetensors_model(files, {});
  ASSERT_EQ(m.units.size(), 4u);
  EXPECT_EQ(m.units[0].name, "root");
  EXPECT_TRUE(m.units[0].root);
  EXPECT_EQ(m.units[0].tensors.size(), 2u);
  EXPECT_EQ(m.units[1].name, "layers.0");
  EXPECT_EQ(m.units[1].count, 2);  // and layers.1
  EXPECT_EQ(m.units[1].tensors[0].name, "w");
  EXPECT_EQ(m.units[2].name, "layers.2");
  EXPECT_EQ(m.units[2].tensors[0].name, "experts.0.w");
  EXPECT_EQ(m.units[3].name, "layers.10");
  EXPECT_EQ(make_plan(m, options_of("zero3", {2})).parameters(), 40 + 4 + 3 * 24 + 16);
  EXPECT_THAT(m.notes, ElementsAre(HasSubstr("left out: steps, I64")));
  EXPECT_EQ(make_plan(m, options_of("zero3", {2})).units[0].groups.size(), 2u);  // bfloat16, float32
  EXPECT_EQ(safetensors_model(files, Dtype::kFloat32).units[0].tensors[0].dtype, Dtype::kFloat32);
}

TEST(ModelReaders, SafetensorsErrorsSayWhere) {
  auto one = [](const std::filesystem::path& p) { safetensors_model(std::vector{p}, {}); };
  EXPECT_THAT(error_of([&] { one("/no/such.safetensors"); }), HasSubstr("/no/such.safetensors: cannot be read"));
  const auto cut = safetensors_file("plan-cut", "{}", 1000);
  EXPECT_THAT(error_of([&] { one(cut); }), HasSubstr("its header should have 1000 bytes, and 2 follow"));
  std::filesystem::resize_file(cut, 5);
  EXPECT_THAT(error_of([&] { one(cut); }), HasSubstr("it has 5 bytes"));
  EXPECT_THAT(error_of([&] { one(safetensors_file("plan-json", "{\"a\" 1}")); }),
              HasSubstr("its header: JSON, line 1"));
  EXPECT_THAT(error_of([&] { one(safetensors_file("plan-list", "[]")); }), HasSubstr("expected an object"));
  EXPECT_THAT(error_of([&] { one(safetensors_file("plan-key", "{\"a\": {\"dtype\": \"F32\"}}")); }),
              HasSubstr("tensor \"a\": JSON: expected a member \"shape\""));
  const auto eight = safetensors_file("plan-fp8", "{" + entry("a", "F8_E4M3", "[2]") + "}");
  EXPECT_THAT(error_of([&] { one(eight); }), HasSubstr("tensor \"a\" has dtype F8_E4M3"));
  EXPECT_EQ(safetensors_model(std::vector{eight}, Dtype::kBFloat16).units[0].tensors[0].dtype, Dtype::kBFloat16);
  const std::vector<std::filesystem::path> twice{safetensors_file("plan-a", "{" + entry("a", "F32", "[2]") + "}"),
                                                 safetensors_file("plan-b", "{" + entry("a", "F32", "[2]") + "}")};
  EXPECT_THAT(error_of([&] { safetensors_model(twice, {}); }), HasSubstr("tensor \"a\" is in "));
  EXPECT_THAT(error_of([] { read_model({"a.json", "GPT-2 XL"}, {}); }), HasSubstr("expected one model"));
  EXPECT_THAT(error_of([] { read_model({"/no/such.json"}, {}); }), HasSubstr("cannot be read"));
}

TEST(PlanArguments, AreRead) {
  const auto a = parse_arguments({"GPT-2 XL", "--mesh=8x64", "--strategy", "hfsdp", "--param-dtype", "bf16",
                                  "--main-dtype=own", "--layout", "unpadded", "--block", "32", "--microbatches", "4",
                                  "--gpu-memory", "80", "--reserve=10.5", "--json", "--rank", "3"});
  EXPECT_THAT(a.model, ElementsAre("GPT-2 XL"));
  EXPECT_EQ(a.options.mesh.size(), 512);
  EXPECT_EQ(a.options.precision.param, Dtype::kBFloat16);
  EXPECT_EQ(a.options.precision.main, std::nullopt);
  EXPECT_EQ(a.options.block, 32);
  EXPECT_EQ(a.gpu_memory, (int64_t{139} << 30) / 2);
  EXPECT_TRUE(a.json);
  EXPECT_EQ(a.rank, 3);
  EXPECT_EQ(parse_arguments({"m.json"}).strategy, "zero3");
  EXPECT_EQ(parse_arguments({"m.json", "--mesh", "2x2"}).strategy, "hsdp");
  EXPECT_TRUE(parse_arguments({"--help"}).help);
}

TEST(PlanArguments, ErrorsNameTheOption) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{}, "expected a model"},
      {{"m", "--mash", "8"}, "unknown option --mash"},
      {{"m", "--mesh"}, "--mesh: expected a value"},
      {{"m", "--json=1"}, "--json: takes no value"},
      {{"m", "--rank", "x"}, "--rank: expected an integer, got \"x\""},
      {{"m", "--layout", "dense"}, "--layout: expected padded, unpadded or tensor-atomic, got \"dense\""},
      {{"m", "--comm-dtype", "int8"}, "--comm-dtype: expected float64"},
      {{"m", "--gpu-memory", "-1"}, "--gpu-memory: expected a number of GiB"},
      {{"m", "--gpu-memory", "8", "--reserve", "8"}, "expected more than --reserve"},
      {{"m", "--reserve", "8"}, "--gpu-memory, which is not given"}};
  for (const auto& [words, expected] : cases)
    EXPECT_THAT(error_of([&, w = &words] { parse_arguments(*w); }), HasSubstr(expected));
}

TEST(Fit, NamesTheStrategyThatFits) {
  const auto o = options_of("ddp", {16});
  const auto needs = [&](const std::string& s, std::vector<int64_t> shape) {
    const auto plan = make_plan(three_units(), options_of(s, std::move(shape)));
    return figures(plan, largest_rank(plan)).total();
  };
  const auto all = fit(three_units(), o, "ddp", needs("ddp", {16}));
  EXPECT_TRUE(all.fits());
  const auto less = fit(three_units(), o, "ddp", needs("zero3", {16}));
  EXPECT_FALSE(less.fits());
  ASSERT_TRUE(less.best);
  EXPECT_LE(less.best->bytes, less.memory);
  ASSERT_EQ(less.same_ranks.size(), 6u);  // hsdp and hfsdp on 2 x 8 too
  for (size_t i = 1; i < 6; ++i) EXPECT_LE(less.same_ranks[i - 1].sent, less.same_ranks[i].sent);
  for (const auto& c : less.same_ranks) {
    if (c.sent < less.best->sent) {
      EXPECT_GT(c.bytes, less.memory) << c.strategy;
    }
    EXPECT_EQ(c.bytes, needs(c.strategy, c.mesh.shape)) << c.strategy;
  }
  EXPECT_FALSE(less.more_ranks);
  const auto none = fit(three_units(), o, "ddp", 1);
  EXPECT_FALSE(none.best);
  EXPECT_FALSE(none.more_ranks);  // the peak does not shrink with the ranks
  EXPECT_THROW(fit(three_units(), o, "ddp", 0), ValueError);
}

TEST(Fit, GoesToMoreRanks) {
  Model model{"m", {{"u", 64, false, false, {{"w", {4096, 4}, Dtype::kFloat32}}}}, {}};
  const auto plan = make_plan(model, options_of("zero3", {8}));
  const auto on8 = figures(plan, 0).total();
  const auto result = fit(model, options_of("ddp", {2}), "ddp", on8);
  EXPECT_FALSE(result.best);
  ASSERT_TRUE(result.more_ranks);
  EXPECT_EQ(result.more_ranks->mesh.size(), 8);
  EXPECT_EQ(result.more_ranks->bytes, on8);
}

Report report_of(const std::string& strategy, std::vector<int64_t> shape) {
  Report r{.plan = make_plan(three_units(), options_of(strategy, std::move(shape))), .strategy = strategy};
  r.figures = figures(r.plan, 1);
  r.fit = fit(three_units(), r.plan.options, strategy, 1 << 20);
  r.notes = {"a \"note\"\n"};
  return r;
}

TEST(PlanReport, JsonHoldsTheFigures) {
  const auto r = report_of("hfsdp", {2, 2});
  const auto v = json::parse(as_json(r));
  EXPECT_EQ(v.at("parameters").as_int(), 144);
  EXPECT_EQ(v.at("rank").as_int(), 1);
  EXPECT_EQ(v.at("at_rest").at("total").as_int(), r.figures.rest.total());
  EXPECT_EQ(v.at("transient_peak").at("total").as_int(), r.figures.peak.at.total());
  EXPECT_EQ(v.at("total").as_int(), r.figures.total());
  ASSERT_EQ(v.at("traffic").as_array().size(), 4u);
  EXPECT_EQ(v.at("traffic").as_array()[0].at("axis").as_string(), "outer");
  EXPECT_EQ(v.at("traffic").as_array()[0].at("elements").as_int(), 72);
  EXPECT_TRUE(v.at("fit").at("fits").as_bool());
  EXPECT_EQ(v.at("notes").as_array()[0].as_string(), "a \"note\"\n");
}

TEST(PlanReport, TextSaysWhatMatters) {
  const auto text = as_text(report_of("hfsdp", {2, 2}));
  for (const char* part : {"three: 144 parameters", "2 x 2 (outer x inner), 4 ranks", "memory of rank 1", "at rest",
                           "transient peak", "reduce_scatter", "fits: "})
    EXPECT_THAT(text, HasSubstr(part));
}

int64_t count_of(const std::string& text, const std::string& what) {
  int64_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

TEST(Picture, ShowsEveryPart) {
  const auto plan = make_plan(three_units(), options_of("zero3", {4}));
  const auto svg = as_svg(plan);
  const auto& layout = plan.units[0].groups[0].layout;
  int64_t parts = 0;
  for (int64_t t = 0; t < 2; ++t)
    for (int64_t s = 0; s < 4; ++s) {
      const auto rows = layout.rows(t, s);
      if (rows.begin == rows.end) continue;
      ++parts;
      EXPECT_THAT(svg, HasSubstr("rank " + std::to_string(s) + ": " + (t == 0 ? "w (8, 4)" : "v (4, 4)") + ", rows " +
                                 std::to_string(rows.begin) + ":" + std::to_string(rows.end) + "<"));
    }
  EXPECT_EQ(count_of(svg, "<title>"), parts);
  EXPECT_EQ(count_of(svg, "class='p'"), 4);
}

TEST(Picture, OwnersOfTwoAxes) {
  // Inner-major: the second quarter of the buffer belongs to outer 1, inner 0, which is rank 2.
  auto model = three_units();
  model.units[0].tensors = {{"a<b", {4, 4}, Dtype::kFloat32}};
  const auto svg = as_svg(make_plan(model, options_of("hfsdp", {2, 2})));
  EXPECT_THAT(svg, HasSubstr("rank 2: a&lt;b (4, 4), rows 1:2<"));
  // hsdp has two pieces, with a copy each.
  const auto copies = as_svg(make_plan(model, options_of("hsdp", {2, 2})));
  EXPECT_EQ(count_of(copies, "class='p'"), 2);
  EXPECT_THAT(copies, HasSubstr("rank 1 and 1 with copies: a&lt;b (4, 4), rows 2:4<"));
}

TEST(Picture, StaysSmallForManyRanks) {
  const auto model = zoo_model("Llama-3 8B", Dtype::kFloat32);
  for (const int64_t ranks : {1024, 131072}) {
    const auto plan = make_plan(model, options_of("zero3", {ranks}));
    size_t groups = 0;
    for (const auto& unit : plan.units) groups += unit.groups.size();
    EXPECT_GT(groups, 3u);  // the block's rows do not divide in one buffer
    const auto picture = as_svg(plan);
    EXPECT_EQ(count_of(picture, "class='p'"), static_cast<int64_t>(groups) * 1024);
    EXPECT_LT(picture.size(), 2'000'000u);
    if (ranks > 1024) {
      EXPECT_THAT(picture, HasSubstr("a cell is 128 pieces"));
    }
  }
}

}  // namespace
}  // namespace fsdp::plan
