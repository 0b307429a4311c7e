#include <fsdp/layout.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/layout_checks.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Rows = GlobalLayout::Rows;

void expect_refused(const std::function<void()>& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const ValueError& e) {
    EXPECT_THAT(e.what(), HasSubstr(part));
  }
}

TEST(GlobalLayout, ByHandIsChecked) {  // LAY-13
  const std::vector<Shape> one{{2, 3}}, two{{2, 3}, {2, 3}};
  EXPECT_NO_THROW(GlobalLayout(one, {0}, 12, {0, 6}));
  EXPECT_NO_THROW(GlobalLayout(one, {3}, 12, {0, 6})) << "the cut at 6 is between the two rows";
  expect_refused([&] { GlobalLayout(one, {0}, -1, {0}); }, "expected a size of at least 0, got -1");
  expect_refused([&] { GlobalLayout(one, {0, 6}, 12, {0, 6}); }, "expected one offset per tensor (1), got 2");
  expect_refused([&] { GlobalLayout(one, {-3}, 12, {0, 6}); }, "tensor 0 (2, 3) at [-3, 3) lies outside the buffer");
  expect_refused([&] { GlobalLayout(one, {9}, 12, {0, 6}); }, "at [9, 15) lies outside the buffer of 12 elements");
  expect_refused(
      [&] {
        GlobalLayout(one, {1}, 12, {0, 6});
      },
      "the boundary of segment 1 at element 6 splits a row of tensor 0 (2, 3) at [1, 7)");
  expect_refused([&] { GlobalLayout(two, {0, 3}, 12, {0, 6}); }, "tensors 0 at [0, 6) and 1 at [3, 9) overlap");
  expect_refused([&] { GlobalLayout(one, {0}, 12, {}); }, "expected the segments to begin at element 0");
  expect_refused([&] { GlobalLayout(one, {0}, 12, {1, 6}); }, "expected the segments to begin at element 0");
  expect_refused([&] { GlobalLayout(one, {0}, 12, {0, 9, 6}); }, "segment 2 begins at 6: segments must ascend");
  expect_refused([&] { GlobalLayout(one, {0}, 12, {0, 13}); }, "segment 1 begins at 13");
}

// Equal segments are checked by two cuts per tensor only: a wrong second cut must be seen, and cuts that do not exist
// behind the last segment must not.
TEST(GlobalLayout, CutsOfEqualSegmentsAreChecked) {
  expect_refused([] { GlobalLayout({{8, 3}}, {1}, 28, {0, 7, 14, 21}); }, "segment 2 at element 14 splits a row");
  EXPECT_NO_THROW(GlobalLayout({{8, 3}}, {1}, 25, {0, 7}));
  EXPECT_NO_THROW(GlobalLayout({{8, 3}}, {0}, 24, {0, 6, 12, 18}));
  EXPECT_NO_THROW(GlobalLayout({{3}, {0, 4}}, {0, 1}, 4, {0, 1, 2, 3}));
}

TEST(GlobalLayout, EqualityIsOfAllMembers) {  // LAY-14
  const GlobalLayout l({{2, 3}}, {0}, 12, {0, 6});
  EXPECT_EQ(l, GlobalLayout({{2, 3}}, {0}, 12, {0, 6}));
  EXPECT_NE(l, GlobalLayout({{3, 2}}, {0}, 12, {0, 6}));
  EXPECT_NE(l, GlobalLayout({{2, 3}}, {6}, 12, {0, 6}));
  EXPECT_NE(l, GlobalLayout({{2, 3}}, {0}, 13, {0, 6}));
  EXPECT_NE(l, GlobalLayout({{2, 3}}, {0}, 12, {0, 9}));
}

TEST(GlobalLayout, Queries) {
  const GlobalLayout l({{4, 2, 3}, {5}, {0, 7}}, {6, 0, 3}, 36, {0, 12, 18});
  EXPECT_EQ(l.num_tensors(), 3);
  EXPECT_EQ(l.num_segments(), 3);
  EXPECT_EQ(l.row_size(0), 6);
  EXPECT_EQ(l.row_size(1), 1);
  EXPECT_EQ(l.numel(0), 24);
  EXPECT_EQ(l.numel(2), 0);
  EXPECT_EQ(l.payload(), 29);
  EXPECT_DOUBLE_EQ(l.padding_ratio(), 7.0 / 29.0);
  EXPECT_EQ(GlobalLayout({}, {}, 0, {0}).padding_ratio(), 0.0);
  EXPECT_FALSE(l.equal_segments());
  EXPECT_EQ(l.rank_size(1), 6);
  EXPECT_EQ(l.rank_size(2), 18);
  EXPECT_EQ(l.rows(0, 0), (Rows{0, 1}));
  EXPECT_EQ(l.rows(0, 2), (Rows{2, 4}));
  EXPECT_EQ(l.rows(2, 0), (Rows{0, 0}));
  EXPECT_EQ(l.rows_in(0, 0, 36), (Rows{0, 4}));
  EXPECT_EQ(l.rows_in(1, 2, 4), (Rows{2, 4}));
  EXPECT_THROW(l.rows_in(0, 7, 36), StateError);
  EXPECT_THROW(l.rank_size(3), ValueError);
  EXPECT_THROW(l.rank_size(-1), ValueError);
}

TEST(RowAtomicLayout, RefusesWrongArguments) {  // LAY-10, LAY-11, LAY-12
  const std::vector<Shape> ok{{2, 3}};
  const auto plan = [](const Shape& shape) { build_row_atomic_layout(std::vector<Shape>{shape}, 2); };
  for (auto kind : {ShardLayout::kPadded, ShardLayout::kUnpadded}) {
    expect_refused([&] { build_row_atomic_layout(ok, 0, 1, kind); }, "expected at least one rank, got dp_size 0");
    expect_refused([&] { build_row_atomic_layout(ok, -2, 1, kind); }, "got dp_size -2");
    expect_refused([&] { build_row_atomic_layout(ok, 2, 0, kind); }, "at least one row, got block_size 0");
  }
  expect_refused([&] { plan({}); }, "zero-dimensional shape has no rows to shard; plan it as shape (1)");
  expect_refused([&] { plan({4, 0}); }, "shape (4, 0): dimension 1 is 0");
  expect_refused([&] { plan({-4, 2}); }, "shape (-4, 2): dimension 0 is -4");
  EXPECT_EQ(build_row_atomic_layout(std::vector<Shape>{{0, 4}}, 2).size, 0);  // LAY-12
  EXPECT_EQ(build_row_atomic_layout(std::vector<Shape>{}, 3).size, 0);        // LAY-T33
}

TEST(RowAtomicLayout, RefusesOverflow) {  // LAY-16
  const int64_t big = int64_t{1} << 40;
  for (auto kind : {ShardLayout::kPadded, ShardLayout::kUnpadded}) {
    expect_refused(
        [&] {
          build_row_atomic_layout(std::vector<Shape>{{big, big}}, 2, 1, kind);
        },
        "tensor size does not fit in 64 bits");
    expect_refused(
        [&] {
          build_row_atomic_layout(std::vector<Shape>{{1, big, big}}, 2, 1, kind);
        },
        "row size does not fit in 64 bits");
    expect_refused(
        [&] {
          build_row_atomic_layout(std::vector<Shape>(2, {big, big / 8 * 7 / 131072}), 2, 1, kind);
        },
        "does not fit in 64 bits");
  }
  expect_refused([&] { build_row_atomic_layout(std::vector<Shape>{{1, big}}, big); }, "size does not fit in 64 bits");
}

TEST(RowAtomicLayout, RowsOfALinear) {  // LAY-R04
  const auto l = build_row_atomic_layout(std::vector<Shape>{{16, 8}, {16}}, 2);
  EXPECT_EQ(l.size, 144);
  EXPECT_EQ(l.rows(0, 0), (Rows{0, 9}));
  EXPECT_EQ(l.rows(0, 1), (Rows{9, 16}));
  EXPECT_EQ(l.rows(1, 0), (Rows{}));
  EXPECT_EQ(l.rows(1, 1), (Rows{0, 16}));
}

TEST(RowAtomicLayout, EmptyTensorsDoNotOverlap) {  // LAY-15
  const auto l = build_row_atomic_layout(std::vector<Shape>{{0, 6}, {3, 3}, {1, 1}, {3, 3}, {0, 1}}, 3);
  test::expect_valid(l);
  EXPECT_LE(l.size, 27);
}

TEST(UnpaddedLayout, CutsAreBetweenRowsAndEven) {
  // 28 + 44 + 52 elements: even cuts at 31, 62, 93 move to the nearest row.
  const auto l = build_row_atomic_layout(std::vector<Shape>{{4, 7}, {4, 11}, {4, 13}}, 4, 1, ShardLayout::kUnpadded);
  EXPECT_THAT(l.tensor_to_offset, ElementsAre(0, 28, 72));
  EXPECT_THAT(l.rank_to_offset, ElementsAre(0, 28, 61, 98));
  EXPECT_EQ(l.size, 124);
  test::expect_valid(l);
}

TEST(UnpaddedLayout, MoreRanksThanRowsLeavesSomeEmpty) {
  const auto l = build_row_atomic_layout(std::vector<Shape>{{2, 6}}, 5, 1, ShardLayout::kUnpadded);
  test::expect_valid(l);
  int64_t holders = 0;
  for (int64_t r = 0; r < 5; ++r) holders += l.rank_size(r) > 0;
  EXPECT_EQ(holders, 2);
}

TEST(UnpaddedLayout, BlocksStayWhole) {
  // 96 rows are three blocks of 32; 40 rows are one block and a short one.
  const std::vector<Shape> shapes{{96, 64}, {40, 64}};
  const auto l = build_row_atomic_layout(shapes, 5, 32, ShardLayout::kUnpadded);
  test::expect_valid(l, 32);
  EXPECT_EQ(l.size, 136 * 64);
  test::expect_valid(build_row_atomic_layout(shapes, 5, 32), 32);
}

TEST(TensorAtomicLayout, KeepsTensorsWholeWithTheirOwner) {
  const auto l = build_tensor_atomic_layout(std::vector<Shape>{{2, 3}, {4}, {5, 1}}, std::vector<int64_t>{2, 0, 2}, 4);
  EXPECT_THAT(l.tensor_to_offset, ElementsAre(4, 0, 10));
  EXPECT_THAT(l.rank_to_offset, ElementsAre(0, 4, 4, 15));
  EXPECT_EQ(l.size, 15);
  EXPECT_EQ(l.rows(2, 2), (Rows{0, 5}));
  EXPECT_EQ(l.rank_size(1), 0);
  test::expect_valid(l, 5);
}

TEST(TensorAtomicLayout, RefusesWrongOwners) {
  const auto plan = [](const Shape& shape, const std::vector<int64_t>& owners, int64_t dp_size) {
    build_tensor_atomic_layout(std::vector<Shape>{shape}, owners, dp_size);
  };
  expect_refused([&] { plan({2}, {4}, 4); }, "tensor 0: owner 4 is not one of the 4 ranks");
  expect_refused([&] { plan({2}, {-1}, 4); }, "owner -1");
  expect_refused([&] { plan({2}, {}, 4); }, "expected one owner per tensor (1), got 0");
  expect_refused([&] { plan({2}, {0}, 0); }, "got dp_size 0");
  expect_refused([&] { plan({}, {0}, 1); }, "zero-dimensional");
}

}  // namespace
}  // namespace fsdp
