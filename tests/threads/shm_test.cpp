/// The shared-memory transport, and that it does what gloo does.
#include "support/ranks.h"

#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <numeric>
#include <thread>

namespace fsdp::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

WorldOptions over(const std::string& backend, int64_t timeout_ms = 20'000) {
  auto options = short_timeout(timeout_ms);
  options.backend = backend;
  return options;
}

/// Runs `body(communicator, world)` on ranks as threads.
void on_ranks(const std::string& backend, int64_t ranks,
              const std::function<void(Communicator&, const std::shared_ptr<World>&)>& body,
              int64_t timeout_ms = 20'000) {
  run_threads(
      ranks,
      [&](std::shared_ptr<World> world) {
        auto mesh = init_device_mesh(world, {ranks}, {"dp"});
        body(mesh.communicator(0), world);
      },
      over(backend, timeout_ms));
}

torch::Tensor filled(int64_t n, double seed, torch::ScalarType type) {
  auto t = torch::sin(torch::arange(n, torch::kDouble) * 0.7 + seed) * 3;
  return torch::isIntegralType(type, true) ? (t * 10).round().to(type) : t.to(type);
}

std::vector<int64_t> offsets(const std::vector<int64_t>& counts) {
  std::vector<int64_t> at(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), at.begin() + 1);
  return at;
}

/// The ranks' inputs summed in order, in the type that sums are kept in.
torch::Tensor sum_of(int64_t ranks, int64_t n, double scale, torch::ScalarType type) {
  const bool low = type == torch::kBFloat16 || type == torch::kHalf;
  auto sum = filled(n, 0, type).to(low ? torch::kFloat : type);
  for (int64_t r = 1; r < ranks; ++r) sum += filled(n, static_cast<double>(r), type).to(sum.scalar_type());
  if (scale != 1.0) sum *= scale;
  return sum.to(type);
}

class Transport : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Both, Transport, ::testing::Values("gloo", "shm"), [](const auto& i) { return i.param; });

// Sizes around the slots' (256 KiB): many rounds, a last one of one element, parts without elements, ranks that have
// all.
TEST_P(Transport, LargeAndUnevenParts) {
  for (int64_t ranks : {2, 3, 5}) {
    on_ranks(GetParam(), ranks, [&](Communicator& comm, const auto&) {
      const auto me = comm.rank();
      for (int64_t unit : {0, 1, 7, 4'097, 65'537, 200'000}) {
        for (int shape = 0; shape < 3; ++shape) {
          std::vector<int64_t> counts(static_cast<size_t>(ranks), unit);
          if (shape == 1)
            for (int64_t r = 0; r < ranks; ++r) counts[r] = r % 2 ? 0 : unit / (r + 1);
          if (shape == 2)
            for (int64_t r = 0; r < ranks; ++r) counts[r] = r == ranks - 1 ? 2 * unit + 1 : 0;
          const auto at = offsets(counts);
          const auto n = at.back();
          const auto type = unit % 2 ? torch::kFloat : torch::kBFloat16;
          const auto whole = filled(n, 0.5, type);
          auto out = torch::zeros({n}, type);
          comm.all_gather(out, whole.narrow(0, at[me], counts[me]).clone(), counts).wait();
          ASSERT_TRUE(torch::equal(out, whole)) << unit << " " << shape;

          auto in = filled(n, static_cast<double>(me), type);
          const auto before = in.clone();
          auto part = torch::empty({counts[me]}, type);
          comm.reduce_scatter(part, in, 0.25, counts).wait();
          ASSERT_TRUE(torch::equal(part, sum_of(ranks, n, 0.25, type).narrow(0, at[me], counts[me])));
          ASSERT_TRUE(torch::equal(in, before)) << "the input changed";

          comm.all_reduce(in, ReduceOp::kSum, 0.25).wait();
          ASSERT_TRUE(torch::equal(in, sum_of(ranks, n, 0.25, type)));

          auto sent = filled(n, static_cast<double>(me), type);
          comm.broadcast(sent, 1).wait();
          ASSERT_TRUE(torch::equal(sent, filled(n, 1, type)));

          // Rank r sends (r + d) % 3 * unit elements to rank d.
          std::vector<int64_t> to, from;
          for (int64_t d = 0; d < ranks; ++d) to.push_back((me + d) % 3 * unit), from.push_back((d + me) % 3 * unit);
          std::vector<torch::Tensor> outgoing, expected;
          for (int64_t d = 0; d < ranks; ++d) {
            outgoing.push_back(filled(to[d], static_cast<double>(me * ranks + d), type));
            expected.push_back(filled(from[d], static_cast<double>(d * ranks + me), type));
          }
          auto received = torch::zeros({offsets(from).back()}, type);
          comm.all_to_all(received, torch::cat(outgoing), from, to).wait();
          ASSERT_TRUE(torch::equal(received, torch::cat(expected)));
        }
      }
    });
  }
}

TEST_P(Transport, EveryDtype) {
  on_ranks(GetParam(), 3, [&](Communicator& comm, const auto&) {
    const auto me = static_cast<double>(comm.rank());
    constexpr int64_t kEach = 1'001, kAll = 3 * kEach;
    for (auto type : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kLong, torch::kInt,
                      torch::kShort, torch::kChar, torch::kByte}) {
      auto t = filled(kAll, me, type);
      comm.all_reduce(t).wait();
      EXPECT_TRUE(torch::equal(t, sum_of(3, kAll, 1.0, type))) << type;
      auto least = filled(kAll, me, type), most = least.clone();
      comm.all_reduce(least, ReduceOp::kMin).wait();
      comm.all_reduce(most, ReduceOp::kMax).wait();
      const std::vector<torch::Tensor> all{filled(kAll, 0, type), filled(kAll, 1, type), filled(kAll, 2, type)};
      EXPECT_TRUE(torch::equal(least, torch::minimum(torch::minimum(all[0], all[1]), all[2]))) << type;
      EXPECT_TRUE(torch::equal(most, torch::maximum(torch::maximum(all[0], all[1]), all[2]))) << type;
    }
    // Moved as bytes.
    for (auto type : {torch::kBool, torch::kComplexFloat, torch::kFloat8_e4m3fn}) {
      const auto bits = torch::arange(kAll * static_cast<int64_t>(c10::elementSize(type)), torch::kByte) % 2;
      const auto whole = bits.view(type);
      auto out = torch::zeros({kAll}, type);
      comm.all_gather(out, whole.narrow(0, comm.rank() * kEach, kEach)).wait();
      EXPECT_TRUE(torch::equal(out.view(torch::kByte), bits)) << type;
    }
  });
}

TEST(Shm, NoSumOfTypesThatHaveNone) {
  on_ranks("shm", 2, [](Communicator& comm, const auto&) {
    auto t = torch::zeros({4}, torch::kFloat8_e4m3fn);
    EXPECT_THAT(thrown<ValueError>([&] { comm.all_reduce(t); }), HasSubstr("Float8_e4m3fn"));
  });
}

TEST_P(Transport, NanWinsMinimumAndMaximum) {
  on_ranks(GetParam(), 2, [](Communicator& comm, const auto&) {
    for (auto op : {ReduceOp::kMin, ReduceOp::kMax}) {
      auto t = torch::tensor({1.f, 2.f, 3.f});
      t[comm.rank()] = NAN;
      comm.all_reduce(t, op).wait();
      EXPECT_TRUE(std::isnan(t[0].item<float>()) && std::isnan(t[1].item<float>()));
      EXPECT_EQ(t[2].item<float>(), 3.f);
    }
  });
}

// Both transports add in the order of ranks, in fp32, and round once: the same bits on each rank and over each.
TEST(Shm, SameBitsAsGloo) {
  for (int64_t ranks : {2, 4})
    for (auto type : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      constexpr int64_t kElements = 300'001;
      std::vector<torch::Tensor> results;
      std::mutex mutex;
      for (const char* backend : {"gloo", "shm", "shm"})
        on_ranks(backend, ranks, [&](Communicator& comm, const auto&) {
          auto t = filled(kElements, 1.7 * static_cast<double>(comm.rank()), type);
          comm.all_reduce(t, ReduceOp::kAvg).wait();
          std::lock_guard lock(mutex);
          results.push_back(t);
        });
      for (const auto& r : results) EXPECT_TRUE(torch::equal(r, results.front())) << type << " " << ranks;
    }
}

// Submitted together, waited for late, in another order, or not at all.
TEST_P(Transport, OperationsRunInOrderOfSubmission) {
  on_ranks(GetParam(), 3, [](Communicator& comm, const auto&) {
    constexpr int64_t kElements = 150'000;
    std::vector<torch::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 12; ++i) {
      tensors.push_back(torch::full({i % 2 ? kElements : 10}, static_cast<double>(comm.rank() + i)));
      works.push_back(comm.all_reduce(tensors.back()));
    }
    works[7].wait();
    works[2].wait();
    works.back().wait();
    for (int i = 0; i < 12; ++i) {
      EXPECT_TRUE(works[i].done());
      EXPECT_EQ(off_by(tensors[i], 3.0 * i + 3), 0.0);
    }
  });
}

// A rank that computes for long and waits for nothing still takes part, also in what does not fit the slots.
TEST_P(Transport, PeersNeedNoWaitOfThisRank) {
  on_ranks(GetParam(), 2, [](Communicator& comm, const std::shared_ptr<World>& world) {
    auto t = torch::ones({1'000'000});
    auto work = comm.all_reduce(t);
    if (comm.rank() == 0) work.wait();
    world->barrier();  // rank 1 comes here first
    while (!work.done()) std::this_thread::yield();
    EXPECT_EQ(off_by(t, 2.0), 0.0);
  });
}

TEST_P(Transport, ManyCommunicatorsAtOnce) {
  run_threads(
      4,
      [](std::shared_ptr<World> world) {
        auto mesh = init_device_mesh(world, {2, 2}, {"outer", "inner"});
        auto a = torch::ones({100'000}), b = a.clone(), c = a.clone();
        for (int i = 0; i < 5; ++i) {
          auto gather = mesh.communicator("inner", Channel::kGather).all_reduce(a);
          auto reduce = mesh.communicator("inner", Channel::kReduce).all_reduce(b);
          auto outer = mesh.communicator("outer").all_reduce(c);
          // Not in one order: no rank may depend on that.
          if (world->rank() % 2)
            gather.wait(), outer.wait(), reduce.wait();
          else
            reduce.wait(), gather.wait(), outer.wait();
        }
        for (const auto& t : {a, b, c}) EXPECT_EQ(off_by(t, 32.0), 0.0);
      },
      over(GetParam()));
}

TEST_P(Transport, Split) {
  on_ranks(GetParam(), 4, [](Communicator& comm, const auto&) {
    auto half = comm.split(comm.rank() % 2, -comm.rank(), "half");
    EXPECT_EQ(half->backend(), GetParam());
    EXPECT_EQ(half->size(), 2);
    EXPECT_EQ(half->rank(), comm.rank() < 2 ? 1 : 0);
    auto t = torch::full({3}, static_cast<double>(comm.rank()));
    half->all_reduce(t).wait();
    EXPECT_EQ(off_by(t, comm.rank() % 2 ? 4.0 : 2.0), 0.0);
    EXPECT_EQ(comm.split(comm.rank(), 0, "alone")->size(), 1);
  });
}

TEST(Shm, DisagreementSaysWhatThePeerRuns) {
  const auto text = thrown<CommError>([] {
    on_ranks("shm", 2, [](Communicator& comm, const auto&) {
      auto t = torch::ones({4});
      comm.rank() == 1 ? comm.broadcast(t, 1, "blocks.1").wait()
                       : comm.all_reduce(t, ReduceOp::kSum, 1.0, "blocks.0").wait();
    });
  });
  EXPECT_THAT(text, AnyOf(HasSubstr("all_reduce of 4 Float elements, unit 'blocks.0', on mesh axis 'dp' (ranks 0, 1) "
                                    "failed: rank 1 runs another collective"),
                          HasSubstr("broadcast of 4 Float elements, unit 'blocks.1', on mesh axis 'dp' (ranks 0, 1) "
                                    "failed: rank 0 runs another collective")));
}

TEST(Shm, AllToAllCountsAreChecked) {
  const auto text = thrown<CommError>([] {
    on_ranks("shm", 2, [](Communicator& comm, const auto&) {
      const std::vector<int64_t> equal{2, 2}, more{2, 3}, less{3, 2};
      auto in = torch::ones({4});
      if (comm.rank() == 0)
        comm.all_to_all(torch::ones({5}), in, more, equal).wait();
      else
        comm.all_to_all(torch::ones({4}), in, equal, equal).wait();
    });
  });
  EXPECT_THAT(text, HasSubstr("rank 1 sends 8 bytes to rank 0, which expects 12"));
}

TEST(Shm, LateRanksAreNamedAndTheOthersHearOfIt) {
  std::vector<std::string> texts(4);
  run_threads(
      4,
      [&](std::shared_ptr<World> world) {
        auto mesh = init_device_mesh(world, {4}, {"dp"});
        auto& comm = mesh.communicator(0);
        comm.barrier();
        if (world->rank() < 2) {
          texts[world->rank()] = thrown<CommError>([&] { comm.all_reduce(torch::ones({4})).wait(); });
          // Refused at once now.
          EXPECT_THAT(thrown<CommError>([&] { comm.all_reduce(torch::ones({4})).wait(); }), HasSubstr("failed before"));
        }
      },
      over("shm", 700));
  EXPECT_THAT(texts[0] + texts[1], HasSubstr("nothing came from ranks 2, 3 within 700 ms"));
  for (int r : {0, 1}) EXPECT_THAT(texts[r], HasSubstr("ranks 2, 3 within 700 ms"));
}

TEST(Shm, AbortEndsWaitsEverywhere) {
  on_ranks(
      "shm", 3,
      [](Communicator& comm, const std::shared_ptr<World>& world) {
        comm.barrier();
        const auto begin = std::chrono::steady_clock::now();
        if (comm.rank() == 2) {
          comm.abort();
          comm.abort();
        } else {
          auto large = torch::ones({1'000'000});
          auto first = comm.all_reduce(large), second = comm.all_reduce(torch::ones({4}));
          EXPECT_THAT(thrown<CommError>([&] { second.wait(); }), HasSubstr("rank 2: aborted"));
          EXPECT_THAT(thrown<CommError>([&] { first.wait(); }), HasSubstr("rank 2: aborted"));
        }
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
        EXPECT_THAT(thrown<CommError>([&] { comm.barrier(); }), HasSubstr("rank 2: aborted"));
        world->barrier();
      },
      600'000);
}

// From another thread, in the middle of whatever runs.
TEST(Shm, AbortFromAnotherThread) {
  for (int after_us : {0, 50, 300, 2'000})
    on_ranks(
        "shm", 2,
        [&](Communicator& comm, const std::shared_ptr<World>& world) {
          std::thread other;
          if (comm.rank() == 0)
            other = std::thread([&] {
              std::this_thread::sleep_for(std::chrono::microseconds(after_us));
              comm.abort();
            });
          thrown<CommError>([&] {
            auto t = torch::zeros({300'000});
            for (int64_t i = 0;; ++i) {
              comm.all_reduce(t).wait();
              EXPECT_EQ(off_by(t, 0.0), 0.0);
            }
          });
          if (other.joinable()) other.join();
          world->barrier();
        },
        600'000);
}

TEST(Shm, ChosenByItself) {
  // An empty variable counts as none; the tests' own environment may have chosen.
  const char* chosen = std::getenv("FSDP_BACKEND");
  const std::string before = chosen ? chosen : "";
  setenv("FSDP_BACKEND", "", 1);
  on_ranks("auto", 2, [](Communicator& comm, const auto&) { EXPECT_EQ(comm.backend(), "shm"); });
  on_ranks("gloo", 2, [](Communicator& comm, const auto&) { EXPECT_EQ(comm.backend(), "gloo"); });
  setenv("FSDP_BACKEND", "gloo", 1);
  on_ranks("auto", 2, [](Communicator& comm, const auto&) { EXPECT_EQ(comm.backend(), "gloo"); });
  on_ranks("shm", 2, [](Communicator& comm, const auto&) { EXPECT_EQ(comm.backend(), "shm"); });
  setenv("FSDP_BACKEND", before.c_str(), 1);
}

/// No file may grow beyond the limit while it lives: the segment's memory is such a file.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit now{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &now);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  sighandler_t handler_;
};

TEST(Shm, NoRoomFallsBackOrIsAnError) {
  const FileSizeLimit limit(512 * 1024);
  const char* chosen = std::getenv("FSDP_BACKEND");
  const std::string before = chosen ? chosen : "";
  setenv("FSDP_BACKEND", "", 1);
  on_ranks("auto", 2, [](Communicator& comm, const auto&) {
    EXPECT_EQ(comm.backend(), "gloo");
    auto t = torch::ones({4});
    comm.all_reduce(t).wait();
    EXPECT_EQ(off_by(t, 2.0), 0.0);
  });
  setenv("FSDP_BACKEND", before.c_str(), 1);
  EXPECT_THAT(thrown<CommError>([] { on_ranks("shm", 2, [](Communicator&, const auto&) {}); }),
              HasSubstr("rank 0: no room for"));
}

// Eight ranks' segment fits what containers give by default.
TEST(Shm, EightRanksInSixtyFourMegabytes) {
  const FileSizeLimit limit(8 * 1024 * 1024);
  on_ranks("shm", 8, [](Communicator& comm, const auto&) {
    auto t = torch::ones({100'000});
    comm.all_reduce(t).wait();
    EXPECT_EQ(off_by(t, 8.0), 0.0);
  });
}

TEST(Shm, WorksOutliveTheirCommunicator) {
  on_ranks("shm", 2, [](Communicator& comm, const std::shared_ptr<World>& world) {
    auto t = torch::ones({4});
    Work done;
    {
      auto own = comm.split(0, 0, "own");
      done = own->all_reduce(t);
      done.wait();
      world->barrier();
    }
    done.wait();
    EXPECT_TRUE(done.done());
    EXPECT_EQ(off_by(t, 2.0), 0.0);
  });
}

}  // namespace
}  // namespace fsdp::testing
