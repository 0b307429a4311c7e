#include <fsdp/buffer_split.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace fsdp {
namespace {

using ::testing::ElementsAre;

// docs/planner.md, "Several buffers": a Llama-3-8B block on 1024 ranks.
TEST(BufferSplit, RowsThatDivideSeparately) {
  const std::vector<Shape> block{{4096}, {4096, 4096},  {1024, 4096},  {1024, 4096}, {4096, 4096},
                                 {4096}, {14336, 4096}, {14336, 4096}, {4096, 14336}};
  const auto one = build_row_atomic_layout(block, 1024);
  EXPECT_EQ(one.payload(), 218'112'000);
  EXPECT_EQ(one.size, 1024 * 229'376) << "16 x 14336, the next multiple of 28672";
  const auto split = plan_buffers(block, 1024);
  EXPECT_EQ(split.size(), 218'112'000);
  EXPECT_EQ(split.payload(), 218'112'000);
  EXPECT_EQ(split.padding_ratio(), 0.0);
  EXPECT_EQ(split.buffers.size(), 3u);
}

TEST(BufferSplit, StaysWithOneBufferWhereThatIsGoodEnough) {
  const std::vector<Shape> shapes{{4, 4}, {4}, {0, 3}};
  const auto split = plan_buffers(shapes, 2);
  ASSERT_EQ(split.buffers.size(), 1u);
  EXPECT_THAT(split.buffers[0].tensors, ElementsAre(0, 1, 2));
  EXPECT_EQ(split.buffers[0].layout, build_row_atomic_layout(shapes, 2));
  EXPECT_EQ(plan_buffers({}, 2).buffers.size(), 1u);
  EXPECT_EQ(plan_buffers({}, 2).padding_ratio(), 0.0);
}

TEST(BufferSplit, Options) {
  // Rows of 3, 5 and 7: 15, 15 and 28 elements per rank if apart.
  const std::vector<Shape> shapes{{20, 3}, {12, 5}, {16, 7}};
  const auto three = plan_buffers(shapes, 4, {1, 3, 0.0, 0});
  EXPECT_GT(three.buffers.size(), 1u);
  EXPECT_EQ(three.size(), three.payload());
  EXPECT_EQ(plan_buffers(shapes, 4, {1, 1, 0.0, 0}).buffers.size(), 1u);
  EXPECT_LE(plan_buffers(shapes, 4, {1, 2, 0.0, 0}).buffers.size(), 2u);
  EXPECT_EQ(plan_buffers(shapes, 4, {1, 3, 100.0, 0}).buffers.size(), 1u) << "any padding is tolerated";
  EXPECT_EQ(plan_buffers(shapes, 4, {1, 3, 0.0, 100}).buffers.size(), 1u) << "100 elements per rank do not matter";
  EXPECT_THROW(plan_buffers(shapes, 4, {1, 0, 0.0, 0}), ValueError);
  EXPECT_THROW(plan_buffers(shapes, 4, {1, 3, -1.0, 0}), ValueError);
  EXPECT_THROW(plan_buffers(shapes, 4, {1, 3, std::numeric_limits<double>::quiet_NaN(), 0}), ValueError);
  EXPECT_THROW(plan_buffers(shapes, 4, {1, 3, 0.0, -1}), ValueError);
  EXPECT_THROW(plan_buffers(shapes, 4, {0, 3, 0.0, 0}), ValueError);
  EXPECT_THROW(plan_buffers(shapes, 0), ValueError);
}

TEST(BufferSplit, TensorsWithoutElementsStay) {
  const std::vector<Shape> shapes{{0, 9}, {20, 3}, {12, 5}, {16, 7}, {0}};
  const auto split = plan_buffers(shapes, 4, {1, 3, 0.0, 0});
  EXPECT_EQ(split.size(), split.payload());
  size_t tensors = 0;
  for (const auto& b : split.buffers) tensors += b.tensors.size();
  EXPECT_EQ(tensors, shapes.size());
}

// One tensor of three rows on two ranks: two rows each, whatever the buffers.
TEST(BufferSplit, LowerBoundCountsWholeRows) {
  EXPECT_EQ(buffer_split_lower_bound(std::vector<Shape>{{3, 100}}, 2), 400);
  EXPECT_EQ(plan_buffers(std::vector<Shape>{{3, 100}}, 2, {1, 3, 0.0, 0}).size(), 400);
  EXPECT_EQ(buffer_split_lower_bound({}, 2), 0);
}

}  // namespace
}  // namespace fsdp
