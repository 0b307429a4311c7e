/// What ranks learn when one of them fails, or when they do not agree.
#include <array>
#include <thread>

#include "support/ranks.h"
#include "support/transports.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class Agreement : public OnTransport {};
class Arguments : public OnTransport {};
class Timeouts : public OnTransport {};
class Split : public OnTransport {};
class Abort : public OnTransport {};
class Errors : public OnTransport {};
class Barrier : public OnTransport {};

/// Rank 1 comes back when rank 0 has come here, and so waits for nothing any more that rank 1 could fail too early.
void rank_zero_first(World& world) {
  const std::vector<uint8_t> here{1};
  if (world.rank() == 0) world.store()->set("test/rank 0 is here", here);
  if (world.rank() == 1) world.store()->get("test/rank 0 is here");
}

using Disagreement = std::function<void(Communicator&, bool odd)>;

/// Operations that one rank submits otherwise than the rest, and what FSDP_DEBUG says of the two.
struct Case {
  Disagreement submit;
  std::string one, other;
};

std::vector<Case> disagreements() {
  const auto t = [] { return torch::ones({4}); };
  return {
      {[t](Communicator& c, bool odd) { c.all_reduce(t(), odd ? ReduceOp::kMax : ReduceOp::kSum, 1.0, "u").wait(); },
       "all_reduce of 4 Float elements, unit 'u'", "unit 'u', maximum"},
      {[t](Communicator& c, bool odd) { c.all_reduce(t(), ReduceOp::kSum, odd ? 0.5 : 0.25, "u").wait(); },
       "unit 'u', scale 0.5", "unit 'u', scale 0.25"},
      {[t](Communicator& c, bool odd) { c.reduce_scatter(torch::ones({2}), t(), odd ? 0.5 : 0.25, {}, "u").wait(); },
       "unit 'u', scale 0.5", "unit 'u', scale 0.25"},
      {[t](Communicator& c, bool odd) { c.broadcast(t(), odd ? 1 : 0, "u").wait(); }, "unit 'u', root 0",
       "unit 'u', root 1"},
      {[t](Communicator& c, bool odd) {
         const std::vector<int64_t> one{1, 3}, other{3, 1};
         c.all_gather(t(), torch::ones({1}), odd ? other : one, "u").wait();
       },
       "unit 'u', counts 1 3", "unit 'u', counts 3 1"},
      {[t](Communicator& c, bool odd) {
         const std::vector<int64_t> one{1, 3}, other{3, 1};
         c.reduce_scatter(torch::ones({1}), t(), 1.0, odd ? other : one, "u").wait();
       },
       "unit 'u', counts 1 3", "unit 'u', counts 3 1"},
  };
}

TEST_P(Agreement, RootReductionScaleAndCountsMustAgree) {
  for (const auto& c : disagreements())
    thrown<CommError>([&] {
      on_mesh(
          {2}, [&](const DeviceMesh& mesh) { c.submit(mesh.communicator(0), mesh.rank() == 1); }, 1'000);
    });
}

TEST_P(Agreement, DebugNamesBothSidesOnAllRanks) {
  const Variable debug("FSDP_DEBUG", "1");
  for (const auto& c : disagreements()) {
    std::array<std::string, 2> texts;
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      auto& comm = mesh.communicator(0);
      texts[static_cast<size_t>(mesh.rank())] = thrown<CommError>([&] { c.submit(comm, mesh.rank() == 1); });
    });
    for (size_t r = 0; r < 2; ++r)
      EXPECT_THAT(texts[r], AllOf(StartsWith("rank " + std::to_string(r) + ": ranks of mesh axis 'dp'"),
                                  HasSubstr(c.one), HasSubstr(c.other), HasSubstr("rank 0 "), HasSubstr("rank 1 ")));
  }
}

// The ranks' parts of an all_to_all differ by nature.
TEST_P(Agreement, AllToAllMovesDifferentCounts) {
  const Variable debug("FSDP_DEBUG", "1");
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto& comm = mesh.communicator(0);
    CollectiveLog log(mesh.world());
    const bool first = mesh.rank() == 0;
    // Rank 0 sends one element to each, rank 1 three to rank 0 and one to itself.
    const std::vector<int64_t> to = first ? std::vector<int64_t>{1, 1} : std::vector<int64_t>{3, 1};
    const std::vector<int64_t> from = first ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{1, 1};
    auto out = torch::zeros({first ? 4 : 2});
    comm.all_to_all(out, torch::full({first ? 2 : 4}, mesh.rank() + 1.0), from, to).wait();
    EXPECT_EQ(out.sum().item<double>(), first ? 7.0 : 3.0);
    ASSERT_EQ(log.records().size(), 1u);
    EXPECT_EQ(log.records()[0].elements, 4);
  });
}

TEST_P(Agreement, DebugHasNothingToCompareOnAFakeTransport) {
  const Variable debug("FSDP_DEBUG", "1");
  auto options = short_timeout();
  options.backend = "fake";
  run_threads(
      2,
      [](std::shared_ptr<World> world) {
        auto mesh = init_device_mesh(world, {2});
        auto t = torch::full({4}, 3.0);
        mesh.communicator(0).all_reduce(t, ReduceOp::kSum, 1.0, "u").wait();
        EXPECT_EQ(off_by(t, 3.0), 0.0);
      },
      options);
}

TEST_P(Arguments, IntegersAreNotAveragedOrScaled) {
  for (int64_t ranks : {1, 2})
    on_mesh({ranks}, [](const DeviceMesh& mesh) {
      auto& comm = mesh.communicator(0);
      for (auto type : {torch::kLong, torch::kInt, torch::kByte, torch::kBool}) {
        auto t = torch::ones({2}, type), part = torch::ones({2 / comm.size()}, type);
        EXPECT_THAT(thrown<ValueError>([&] { comm.all_reduce(t, ReduceOp::kAvg); }), HasSubstr("averaged or scaled"));
        thrown<ValueError>([&] { comm.all_reduce(t, ReduceOp::kSum, 0.5); });
        thrown<ValueError>([&] { comm.reduce_scatter(part, t, 0.5); });
        EXPECT_TRUE(torch::equal(t, torch::ones({2}, type)));
      }
      auto n = torch::ones({2}, torch::kLong);
      comm.all_reduce(n).wait();
      EXPECT_EQ(off_by(n, static_cast<double>(comm.size())), 0.0);
    });
}

// The peers come one after the other, each within the limit of the last: the operation as a whole is late.
TEST_P(Timeouts, OneDeadlineForAllPeers) {
  const auto text = thrown<CommError>([] {
    on_mesh(
        {3},
        [](const DeviceMesh& mesh) {
          auto& comm = mesh.communicator(0);
          comm.barrier();
          if (comm.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(1'000));
          if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2'600));
          comm.all_reduce(torch::ones({9}), ReduceOp::kSum, 1.0, "head").wait();
        },
        2'000);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("all_reduce of 9 Float elements, unit 'head'"), HasSubstr("within 2000 ms")));
}

TEST_P(Timeouts, LaterOperationsNameTheFirstFailure) {
  on_mesh(
      {2},
      [](const DeviceMesh& mesh) {
        auto& comm = mesh.communicator(0);
        comm.barrier();
        if (comm.rank() == 1) return;
        auto late = comm.all_reduce(torch::ones({4}), ReduceOp::kSum, 1.0, "blocks.0");
        const auto first = thrown<CommError>([&] { late.wait(); });
        EXPECT_THAT(first, AllOf(HasSubstr("unit 'blocks.0'"), HasSubstr("rank 1 within 1000 ms")));
        const auto expect_refused = [&](const std::function<void()>& f, const char* what) {
          EXPECT_THAT(thrown<CommError>(f),
                      AllOf(StartsWith("rank 0: " + std::string(what)), HasSubstr("was not started"),
                            HasSubstr("all_reduce of 4 Float elements, unit 'blocks.0'"), HasSubstr("rank 1")));
        };
        // Refused when submitted: nobody has to wait for them to see it.
        expect_refused([&] { comm.broadcast(torch::ones({5}), 0, "blocks.1"); }, "broadcast of 5 Float elements");
        expect_refused([&] { comm.barrier(); }, "barrier");
        expect_refused([&] { comm.split(0, 0, "half"); }, "split");
        thrown<CommError>([&] { late.wait(); });
      },
      1'000);
}

TEST_P(Timeouts, AMissingRankOfACommunicatorIsNamed) {
  const auto text = thrown<CommError>([] {
    on_mesh(
        {3},
        [](const DeviceMesh& mesh) {
          if (mesh.rank() != 2) mesh.communicator(0);
        },
        500);
  });
  EXPECT_THAT(text,
              AllOf(HasSubstr("connecting mesh axis 'dp' (ranks 0, 1, 2) failed"), HasSubstr("missing ranks: 2")));
}

TEST_P(Split, OrdersInheritsAndKnowsItsRanks) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    auto& all = mesh.communicator_all(Channel::kControl);
    const auto me = mesh.rank();
    // Colors 0, 1, 0, 1; keys turn the order round.
    auto part = all.split(me % 2, -me, "part");
    EXPECT_EQ(part->size(), 2);
    EXPECT_EQ(part->rank(), me < 2 ? 1 : 0);
    EXPECT_EQ(part->world_ranks(), (std::vector<int64_t>{me % 2 + 2, me % 2}));
    EXPECT_EQ(part->axes(), "part");
    CollectiveLog log(mesh.world());
    auto t = torch::full({3}, static_cast<double>(me));
    part->all_reduce(t).wait();
    EXPECT_EQ(off_by(t, static_cast<double>(me % 2 * 2 + 2)), 0.0);
    EXPECT_TRUE(log.records().empty()) << "the control flag is not inherited";
    auto alone = part->split(me, 0, "alone");
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(alone->world_ranks(), std::vector<int64_t>{me});
  });
}

TEST_P(Split, AFailureOfTheWorldReachesIt) {
  const auto text = thrown<StateError>([] {
    on_mesh({2}, [](const DeviceMesh& mesh) {
      auto part = mesh.communicator(0).split(0, mesh.rank(), "part");
      part->barrier();
      rank_zero_first(mesh.world());
      if (mesh.rank() == 1) throw StateError("user error");
      EXPECT_THAT(thrown<CommError>([&] { part->all_reduce(torch::ones({4}), ReduceOp::kSum, 1.0, "u").wait(); }),
                  AllOf(HasSubstr("unit 'u'"), HasSubstr("rank 1: user error")));
    });
  });
  EXPECT_EQ(text, "rank 1: user error");
}

TEST_P(Split, AMissingRankIsNamed) {
  const auto text = thrown<CommError>([] {
    on_mesh(
        {3},
        [](const DeviceMesh& mesh) {
          auto& comm = mesh.communicator(0);
          if (mesh.rank() != 1) comm.split(0, 0, "part");
        },
        500);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("split on mesh axis 'dp' (ranks 0, 1, 2) failed"), HasSubstr("missing ranks: 1")));
}

// A rank that waits in the store, not in a transport, hears of a failure too.
TEST_P(Split, StoreErrorsAreCommErrors) {
  thrown<StateError>([] {
    on_mesh({2}, [](const DeviceMesh& mesh) {
      auto& comm = mesh.communicator(0);
      comm.barrier();
      rank_zero_first(mesh.world());
      if (mesh.rank() == 1) throw StateError("user error");
      EXPECT_THAT(thrown<CommError>([&] { comm.split(0, 0, "part"); }), HasSubstr("rank 1: user error"));
    });
  });
}

TEST_P(Abort, TellsTheReasonToAllRanks) {
  run_threads(
      2,
      [](std::shared_ptr<World> world) {
        auto mesh = init_device_mesh(world, {2}, {"dp"});
        auto& comm = mesh.communicator(0);
        comm.barrier();
        rank_zero_first(*world);
        if (world->rank() == 1) {
          world->abort("the loss is not a number");
          world->abort("and again");
        }
        auto all_reduce = [&] { comm.all_reduce(torch::ones({4}), ReduceOp::kSum, 1.0, "u").wait(); };
        EXPECT_THAT(thrown<CommError>(all_reduce), HasSubstr("rank 1: the loss is not a number"));
        EXPECT_THAT(thrown<CommError>([&] { world->barrier(); }), HasSubstr("the loss is not a number"));
        EXPECT_THAT(thrown<CommError>([&] { mesh.communicator(0, Channel::kGather); }),
                    HasSubstr("the loss is not a number"));
      },
      short_timeout());
}

TEST_P(Errors, NameTheRankOnce) {
  const auto text = thrown<CommError>([] {
    run_threads(
        2,
        [](auto world) {
          if (world->rank() == 0) world->barrier();
        },
        short_timeout(300));
  });
  EXPECT_EQ(text, "rank 0: barrier failed: timed out after 300 ms; missing ranks: 1");
}

TEST_P(Barrier, LeavesNoKeysBehind) {
  run_threads(
      3,
      [](std::shared_ptr<World> world) {
        world->barrier();
        for (int i = 0; i < 20; ++i) world->barrier();
        // At most the last two barriers' two keys of each rank.
        EXPECT_LE(world->store()->getNumKeys(), 3 * 4);
      },
      short_timeout());
}

FSDP_ON_TRANSPORTS(Agreement);
FSDP_ON_TRANSPORTS(Arguments);
FSDP_ON_TRANSPORTS(Timeouts);
FSDP_ON_TRANSPORTS(Split);
FSDP_ON_TRANSPORTS(Abort);
FSDP_ON_TRANSPORTS(Errors);
FSDP_ON_TRANSPORTS(Barrier);

}  // namespace
}  // namespace fsdp::testing
