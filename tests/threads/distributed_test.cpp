/// Worlds, meshes and collectives, and how they fail.
#include <numeric>

#include "support/ranks.h"
#include "support/transports.h"

namespace fsdp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class Collectives : public OnTransport {};
class RunThreads : public OnTransport {};

torch::Tensor ramp(int64_t n, double from, torch::ScalarType type) {
  return (torch::arange(n, torch::kDouble) % 5 + from).to(type);
}

TEST_P(Collectives, ValuesForAllTypesAndCounts) {
  for (int64_t ranks : {1, 2, 3, 4, 8})
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      auto& comm = mesh.communicator("dp");
      const auto me = comm.rank();
      for (auto type : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf, torch::kLong}) {
        std::vector<int64_t> counts;  // uneven, with a zero
        for (int64_t r = 0; r < ranks; ++r) counts.push_back(r == 1 ? 0 : 2 * r + 1);
        const auto n = std::accumulate(counts.begin(), counts.end(), int64_t{0});
        std::vector<torch::Tensor> parts;
        for (int64_t r = 0; r < ranks; ++r) parts.push_back(ramp(counts[r], static_cast<double>(r), type));
        auto out = torch::full({n}, 99, type);
        comm.all_gather(out, parts[me], counts).wait();
        EXPECT_TRUE(torch::equal(out, torch::cat(parts)));
        // In place: the part lies in the output already.
        auto own = out.clone().zero_();
        int64_t at = std::accumulate(counts.begin(), counts.begin() + me, int64_t{0});
        own.narrow(0, at, counts[me]).copy_(parts[me]);
        comm.all_gather(own, own.narrow(0, at, counts[me]), counts).wait();
        EXPECT_TRUE(torch::equal(own, torch::cat(parts)));

        const double scale = type == torch::kLong ? 1.0 : 0.5;
        auto in = ramp(n, static_cast<double>(me), type);
        auto sum = torch::zeros({n}, torch::kDouble);
        for (int64_t r = 0; r < ranks; ++r) sum += ramp(n, static_cast<double>(r), torch::kDouble);
        auto piece = torch::empty({counts[me]}, type);
        comm.reduce_scatter(piece, in, scale, counts).wait();
        EXPECT_TRUE(torch::equal(piece, (sum * scale).narrow(0, at, counts[me]).to(type)));
        comm.reduce_scatter(in.narrow(0, at, counts[me]), in, scale, counts).wait();
        EXPECT_TRUE(torch::equal(in.narrow(0, at, counts[me]), piece));

        auto all = ramp(n, static_cast<double>(me), type);
        comm.all_reduce(all, ReduceOp::kSum, scale).wait();
        EXPECT_TRUE(torch::equal(all, (sum * scale).to(type)));
        auto most = ramp(n, static_cast<double>(me), type), least = most.clone();
        comm.all_reduce(most, ReduceOp::kMax).wait();
        comm.all_reduce(least, ReduceOp::kMin).wait();
        EXPECT_TRUE(torch::equal(most, ramp(n, static_cast<double>(ranks - 1), type)));
        EXPECT_TRUE(torch::equal(least, ramp(n, 0, type)));

        auto sent = ramp(n, static_cast<double>(me), type);
        comm.broadcast(sent, ranks - 1).wait();
        EXPECT_TRUE(torch::equal(sent, ramp(n, static_cast<double>(ranks - 1), type)));

        // Rank r sends r + 1 elements to everybody.
        std::vector<int64_t> to(static_cast<size_t>(ranks), me + 1), from(static_cast<size_t>(ranks));
        std::iota(from.begin(), from.end(), 1);
        auto outgoing = torch::full({ranks * (me + 1)}, me, type);
        auto incoming = torch::empty({ranks * (ranks + 1) / 2}, type);
        comm.all_to_all(incoming, outgoing, from, to).wait();
        int64_t k = 0;
        for (int64_t r = 0; r < ranks; ++r)
          for (int64_t i = 0; i <= r; ++i) EXPECT_EQ(incoming[k++].item<int64_t>(), r);
      }
      comm.barrier();
    });
}

TEST_P(Collectives, LowPrecisionIsSummedInFp32) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    auto& comm = mesh.communicator(0);
    const double values[] = {256, 1, 1};  // bf16 keeps 8 bits: 256 + 1 is 256 again
    auto t = torch::full({7}, values[comm.rank()], torch::kBFloat16);
    comm.all_reduce(t).wait();
    EXPECT_EQ(off_by(t, 258), 0.0);
  });
}

TEST_P(Collectives, ArgumentsAreChecked) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto& comm = mesh.communicator(0);
    auto t = torch::zeros({4});
    thrown<ValueError>([&] { comm.all_gather(t, torch::zeros({3})); });
    thrown<ValueError>([&] { comm.all_gather(t, torch::zeros({2}, torch::kDouble)); });
    thrown<ValueError>([&] { comm.all_gather(t, t, std::vector<int64_t>{1, 2, 1}); });
    thrown<ValueError>([&] { comm.all_gather(t, t, std::vector<int64_t>{5, -1}); });
    thrown<ValueError>([&] { comm.reduce_scatter(t, torch::zeros({5})); });
    thrown<ValueError>([&] { comm.all_reduce(torch::zeros({2, 2})); });
    thrown<ValueError>([&] { comm.all_reduce(torch::zeros({8}).slice(0, 0, 8, 2)); });
    thrown<ValueError>([&] { comm.all_reduce(t, ReduceOp::kMax, 2.0); });
    thrown<ValueError>([&] { comm.broadcast(t, 2); });
    comm.all_reduce(t).wait();
  });
}

// faults: ranks that disagree get an error that names what they were doing, and no data is blended.
TEST_P(Collectives, MismatchIsAnError) {
  for (int kind = 0; kind < 3; ++kind) {
    const auto text = thrown<CommError>([&] {
      on_mesh(
          {2},
          [&](const DeviceMesh& mesh) {
            auto& comm = mesh.communicator(0);
            auto t = torch::ones({4});
            const bool odd = comm.rank() == 1;
            if (kind == 0) comm.all_reduce(odd ? torch::ones({6}) : t, ReduceOp::kSum, 1.0, "blocks.0").wait();
            if (kind == 1) comm.all_reduce(t, ReduceOp::kSum, 1.0, odd ? "blocks.1" : "blocks.0").wait();
            if (kind == 2)
              odd ? comm.broadcast(t, 1, "blocks.0").wait()
                  : comm.all_reduce(t, ReduceOp::kSum, 1.0, "blocks.0").wait();
          },
          1'000);
    });
    EXPECT_THAT(text, HasSubstr("on mesh axis 'dp'"));
    EXPECT_THAT(text, HasSubstr("unit 'blocks."));
  }
}

TEST_P(Collectives, ALateRankIsNamed) {
  const auto text = thrown<CommError>([] {
    on_mesh(
        {2},
        [](const DeviceMesh& mesh) {
          auto& comm = mesh.communicator(0);
          comm.barrier();
          if (comm.rank() == 0) comm.all_reduce(torch::ones({4}), ReduceOp::kSum, 1.0, "head").wait();
        },
        1'000);
  });
  EXPECT_THAT(
      text, StartsWith("rank 0: all_reduce of 4 Float elements, unit 'head', on mesh axis 'dp' (ranks 0, 1) failed: "));
  EXPECT_THAT(text, HasSubstr("rank 1 within 1000 ms"));
}

// A rank that throws in the middle of a step: nobody hangs, its exception is the one that arrives.
TEST_P(RunThreads, TheFirstFailureIsRethrown) {
  for (int64_t ranks : {2, 4}) {
    EXPECT_THAT(thrown<StateError>([&] {
                  on_mesh(
                      {ranks},
                      [&](const DeviceMesh& mesh) {
                        auto model = make_mlp(2);
                        FsdpContext ctx(mesh.device());
                        shard_mlp(*model, ctx, mesh, zero3("dp"));
                        for (int step = 0; step < 3; ++step) {
                          auto loss = mlp_loss(*model, input_of(step, 0, 0), target_of(step, 0, 0));
                          if (step == 1 && mesh.rank() == ranks - 1) throw StateError("user error");
                          loss.backward();
                        }
                      },
                      600'000);
                }),
                HasSubstr("rank " + std::to_string(ranks - 1) + ": user error"));
  }
  thrown<ValueError>([] {
    run_threads(2, [](auto world) {
      if (world->rank() == 1)
        throw ValueError("v");
      else
        world->barrier();
    });
  });
  thrown<CheckpointError>([] { run_threads(1, [](auto) { throw CheckpointError("c"); }); });
  try {
    run_threads(2, [](auto world) {
      if (world->rank() == 0) throw std::out_of_range("inner");
    });
    FAIL();
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "rank 0: inner");
    EXPECT_THROW(std::rethrow_if_nested(e), std::out_of_range);
  }
  thrown<ValueError>([] { run_threads(0, [](auto) {}); });
  WorldOptions unknown;
  unknown.backend = "smoke";
  thrown<ValueError>([&] {
    run_threads(
        1, [](auto) {}, unknown);
  });
}

TEST_P(RunThreads, BarrierNamesMissingRanks) {
  EXPECT_THAT(thrown<CommError>([] {
                run_threads(
                    3,
                    [](auto world) {
                      if (world->rank() != 1) world->barrier();
                    },
                    short_timeout(500));
              }),
              HasSubstr("missing ranks: 1"));
}

TEST(Mesh, CoordinatesAndErrors) {
  on_mesh({2, 2, 2}, [](const DeviceMesh& mesh) {
    const auto r = mesh.world().rank();
    EXPECT_EQ(mesh.rank(), r);
    EXPECT_EQ(mesh.local_rank("a"), r / 4);
    EXPECT_EQ(mesh.local_rank(1), r / 2 % 2);
    EXPECT_EQ(mesh.local_rank(-1), r % 2);
    EXPECT_EQ(mesh.communicator("b").rank(), r / 2 % 2);
    const std::vector<MeshAxis> ac{"a", -1}, ca{"c", "a"}, aa{"a", 0}, none;
    const auto sub = mesh.sub(ac);
    EXPECT_EQ(sub.size(), 4);
    EXPECT_EQ(sub.rank(), r / 4 * 2 + r % 2);
    EXPECT_EQ(&sub.communicator("a"), &mesh.communicator("a"));
    EXPECT_EQ(sub, mesh.sub(ac));
    EXPECT_EQ(mesh.sub(none).size(), 1);
    thrown<ValueError>([&] { mesh.sub(ca); });
    thrown<ValueError>([&] { mesh.sub(aa); });
    thrown<ValueError>([&] { mesh.size("d"); });
    thrown<ValueError>([&] { mesh.size(3); });
    auto t = torch::full({1}, r, torch::kLong);
    sub.communicator_all().all_reduce(t).wait();
    const auto middle = r / 2 % 2;
    EXPECT_EQ(t.item<int64_t>(), 0 + 1 + 4 + 5 + 4 * 2 * middle);
  });
  run_threads(2, [](std::shared_ptr<World> world) {
    thrown<ValueError>([&] { init_device_mesh(world, {3}); });
    thrown<ValueError>([&] { init_device_mesh(world, {2, 0}); });
    thrown<ValueError>([&] { init_device_mesh(world, {2}, {"a", "b"}); });
    thrown<ValueError>([&] { init_device_mesh(world, {2, 1}, {"a", "a"}); });
    thrown<ValueError>([&] { init_device_mesh(world, {}); });
    EXPECT_THAT(init_device_mesh(world, {2, 1}).axis_names(), ElementsAre("dim0", "dim1"));
  });
}

// faults B28: overlapping meshes, and modules and meshes that end in any order.
TEST(Mesh, B28_ManyMeshesOneWorld) {
  run_threads(
      4,
      [](std::shared_ptr<World> world) {
        auto flat = std::make_unique<DeviceMesh>(init_device_mesh(world, {4}, {"dp"}));
        auto grid = init_device_mesh(world, {2, 2}, {"outer", "inner"});
        auto model = make_mlp(1);
        auto other = make_mlp(1);
        FsdpContext a(world->device()), b(world->device());
        shard_mlp(*model, a, *flat, zero3("dp"));
        shard_mlp(*other, b, grid, zero3("inner"));
        mlp_loss(*model, input_of(0, 0, 0), target_of(0, 0, 0)).backward();
        flat.reset();
        mlp_loss(*other, input_of(0, 0, 0), target_of(0, 0, 0)).backward();
        mlp_loss(*model, input_of(0, 0, 0), target_of(0, 0, 0)).backward();
      },
      short_timeout());
}

TEST(Log, RecordsDataCollectivesWhileItLives) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto& comm = mesh.communicator(0);
    auto t = torch::ones({6});
    comm.all_reduce(t).wait();
    CollectiveLog log(mesh.world());
    auto inner = std::make_unique<CollectiveLog>(mesh.world());
    comm.all_gather(t, t.narrow(0, 3 * comm.rank(), 3), {}, "unit").wait();
    comm.barrier();
    mesh.communicator(0, Channel::kControl).all_reduce(t).wait();
    EXPECT_EQ(inner->records().size(), 1u);
    inner.reset();
    comm.reduce_scatter(t.narrow(0, 0, 3), t).wait();
    const auto records = log.records();
    ASSERT_EQ(records.size(), 2u);
    EXPECT_EQ(records[0].axes + records[0].operation + records[0].unit, "dpall_gatherunit");
    EXPECT_EQ(records[1].elements, 6);
  });
}

FSDP_ON_TRANSPORTS(Collectives);
FSDP_ON_TRANSPORTS(RunThreads);

}  // namespace
}  // namespace fsdp::testing
