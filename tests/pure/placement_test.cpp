#include <fsdp/error.h>
#include <fsdp/placement.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp {
namespace {

using ::testing::HasSubstr;

void expect_refused(const Placements& p, const std::string& part) {
  try {
    p.validate();
    FAIL() << "not refused: " << part;
  } catch (const ValueError& e) {
    EXPECT_THAT(e.what(), HasSubstr(part));
  }
}

TEST(Placements, NamedStrategiesAreValid) {
  for (const auto& p : {ddp("a"), zero1("a"), zero2(0), zero3(-1), hsdp("a", "b"), hfsdp(0, 1)})
    EXPECT_NO_THROW(p.validate());
  EXPECT_EQ(to_string(std::span<const Placement>(hfsdp("a", "b").gradient)), "[Partial(avg), Shard(0)]");
}

TEST(Placements, RefusesWhatCannotBe) {  // behaviours FSH-10, FSH-12, FSH-60, FSH-62, DBF-36
  const Replicate r;
  const Shard s;
  expect_refused({{"a"}, {r, r}, {r}, {r}},
                 "Placements::parameter: expected one placement per data-parallel axis (1), got 2");
  expect_refused({{"a"}, {r}, {}, {r}}, "Placements::gradient");
  expect_refused({{"a"}, {r}, {r}, {}}, "Placements::optimizer");
  expect_refused({{"a"}, {Shard{1}}, {r}, {r}}, "dimension 0 only");
  expect_refused({{"a"}, {Shard{-1}}, {r}, {r}}, "dimension 0 only");
  expect_refused({{"a"}, {Partial{}}, {Partial{}}, {r}}, "weights are never partial");
  expect_refused({{"a"}, {r}, {Partial{}}, {Partial{}}}, "weights are never partial");
  expect_refused({{"a"}, {r}, {Partial{ReduceOp::kMax}}, {r}}, "summed or averaged");
  expect_refused({{"a", "b"}, {s, r}, {s, s}, {s, s}}, "axis 'a': is sharded outside axis 'b'");
  expect_refused({{"a", "b"}, {r, r}, {r, r}, {RowAtomic{}, TensorAtomic{}}}, "use one kind of sharding");
  expect_refused({{"a"}, {s}, {s}, {TensorAtomic{}}}, "one kind of sharding");
  expect_refused({{"a"}, {s}, {s}, {BlockAtomic{0}}}, "at least one row");
  expect_refused({{}, {}, {}, {}}, "at least one data-parallel axis");
}

}  // namespace
}  // namespace fsdp
