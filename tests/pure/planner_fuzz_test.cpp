#include <fsdp/buffer_split.h>
#include <fsdp/layout.h>
#include <fsdp/owner_plan.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>

#include "support/layout_checks.h"
#include "zoo/reference_planner.h"

// Random inputs, the same in every run unless FSDP_FUZZ_SEED (and FSDP_FUZZ_INPUTS) say otherwise. A failure prints the
// number of the input; the seed is printed always.
namespace fsdp {
namespace {

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoll(text, nullptr, 10) : otherwise;
}

class Random {
 public:
  Random() {
    const int64_t seed = from_environment("FSDP_FUZZ_SEED", 20261201);
    std::cout << "FSDP_FUZZ_SEED=" << seed << "\n";
    generator_.seed(static_cast<uint64_t>(seed));
  }
  /// In [low, high]; the remainder's small bias does not matter, the same numbers on every platform do.
  int64_t pick(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(generator_() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int64_t n) { return pick(1, n) == 1; }

  Shape shape(int64_t rows, int64_t width) {
    Shape s{one_in(10) ? 0 : pick(1, rows)};
    for (int64_t d = pick(0, 2); d > 0; --d) s.push_back(pick(1, width));
    return s;
  }

 private:
  std::mt19937_64 generator_;
};

int64_t inputs(int64_t otherwise) { return from_environment("FSDP_FUZZ_INPUTS", otherwise); }

TEST(PlannerFuzz, RowAtomic) {
  Random random;
  for (int64_t i = 0, n = inputs(100'000); i < n; ++i) {
    std::vector<Shape> shapes(static_cast<size_t>(random.pick(0, random.one_in(50) ? 40 : 7)));
    const int64_t width = random.pick(1, 16);
    for (auto& s : shapes) s = random.shape(40, width);
    if (!shapes.empty() && random.one_in(4)) shapes.push_back(shapes[0]);
    const int64_t dp_size = random.one_in(20) ? random.pick(1, 300) : random.pick(1, 9);
    const int64_t block = random.one_in(4) ? random.pick(1, 5) : 1;
    SCOPED_TRACE("input " + std::to_string(i));

    const auto padded = build_row_atomic_layout(shapes, dp_size, block);
    test::expect_valid(padded, block);
    ASSERT_EQ(padded.tensor_shapes, shapes);
    ASSERT_EQ(padded.num_segments(), dp_size);
    ASSERT_TRUE(padded.equal_segments());
    ASSERT_EQ(padded.size % dp_size, 0);
    ASSERT_LE(padded.size, dp_size * padded.payload());
    ASSERT_GE(padded.size, row_atomic_lower_bound(shapes, dp_size, block));
    if (block == 1) {
      ASSERT_LE(padded.size, reference::padded_size(shapes, dp_size));
    }
    ASSERT_EQ(padded, build_row_atomic_layout(shapes, dp_size, block));

    const auto unpadded = build_row_atomic_layout(shapes, dp_size, block, ShardLayout::kUnpadded);
    test::expect_valid(unpadded, block);
    ASSERT_EQ(unpadded.size, unpadded.payload());
    ASSERT_EQ(unpadded.num_segments(), dp_size);
    int64_t largest_block = 0;
    for (const auto& s : shapes) largest_block = std::max(largest_block, std::min(block, s[0]) * test::row_of(s));
    for (int64_t r = 0; r < dp_size; ++r)
      ASSERT_LE(unpadded.rank_size(r), (unpadded.size + dp_size - 1) / dp_size + largest_block);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Dimensions up to 2^30: either refused, or right in numbers too large to enumerate rows of.
TEST(PlannerFuzz, LargeNumbersAreRefusedOrRight) {
  Random random;
  int64_t planned = 0, refused = 0;
  for (int64_t i = 0, n = inputs(20'000); i < n; ++i) {
    SCOPED_TRACE("input " + std::to_string(i));
    std::vector<Shape> shapes(static_cast<size_t>(random.pick(1, 4)));
    __int128 payload = 0;
    for (auto& s : shapes) {
      __int128 numel = 1;
      for (int64_t d = random.pick(1, 3); d > 0; --d) {
        s.push_back(random.pick(1, int64_t{1} << random.pick(1, 30)));
        numel *= s.back();
      }
      payload += numel;
    }
    const int64_t dp_size = random.pick(1, 1000);
    for (auto kind : {ShardLayout::kPadded, ShardLayout::kUnpadded}) {
      try {
        const auto l = build_row_atomic_layout(shapes, dp_size, random.pick(1, 3), kind);  // its constructor checks it
        ++planned;
        ASSERT_TRUE(static_cast<__int128>(l.payload()) == payload);
        ASSERT_GE(l.size, l.payload());
      } catch (const ValueError&) {
        ++refused;
        // The whole payload on one rank is a plan: only what overflows even then may be refused.
        ASSERT_TRUE(payload * dp_size > INT64_MAX);
      }
    }
  }
  EXPECT_GT(planned, 0);
  EXPECT_GT(refused, 0);
}

TEST(PlannerFuzz, BufferSplit) {
  Random random;
  for (int64_t i = 0, n = inputs(2'000); i < n; ++i) {
    SCOPED_TRACE("input " + std::to_string(i));
    std::vector<Shape> shapes(static_cast<size_t>(random.pick(0, 12)));
    for (auto& s : shapes) s = random.shape(60, 9);
    const int64_t dp_size = random.pick(1, 20);
    BufferSplitOptions options{random.one_in(3) ? random.pick(1, 4) : 1, random.pick(1, 4), 0.002, 0};
    const auto split = plan_buffers(shapes, dp_size, options);
    ASSERT_GE(split.buffers.size(), 1u);
    ASSERT_LE(static_cast<int64_t>(split.buffers.size()), options.max_buffers);
    std::vector<int> times(shapes.size(), 0);
    for (const auto& b : split.buffers) {
      ASSERT_TRUE(std::is_sorted(b.tensors.begin(), b.tensors.end()));
      ASSERT_EQ(b.tensors.size(), b.layout.tensor_shapes.size());
      for (size_t t = 0; t < b.tensors.size(); ++t) {
        ++times[static_cast<size_t>(b.tensors[t])];
        ASSERT_EQ(b.layout.tensor_shapes[t], shapes[static_cast<size_t>(b.tensors[t])]);
      }
      test::expect_valid(b.layout, options.block_size);
      ASSERT_EQ(b.layout.num_segments(), dp_size);
      ASSERT_TRUE(b.layout.equal_segments());
    }
    for (int t : times) ASSERT_EQ(t, 1);
    ASSERT_LE(split.size(), build_row_atomic_layout(shapes, dp_size, options.block_size).size);
    if (i % 10 == 0) {
      const int64_t bound = buffer_split_lower_bound(shapes, dp_size, options);
      ASSERT_GE(split.size(), bound);
      ASSERT_GE(bound, split.payload());
      // No larger than any other plan either.
      ASSERT_LE(bound, plan_buffers(shapes, dp_size, {options.block_size, options.max_buffers, 0.0, 0}).size());
    }
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(PlannerFuzz, Owners) {
  Random random;
  for (int64_t i = 0, n = inputs(5'000); i < n; ++i) {
    SCOPED_TRACE("input " + std::to_string(i));
    std::vector<Shape> shapes(static_cast<size_t>(random.pick(0, 30)));
    std::vector<int64_t> costs;
    for (auto& s : shapes) {
      s = random.shape(30, 9);
      costs.push_back(element_cost(s));
    }
    const int64_t dp_size = random.pick(1, 12);
    const auto owners = assign_owners(shapes, dp_size);
    const auto loads = owner_loads(costs, owners, dp_size);
    const int64_t bound = owner_load_lower_bound(costs, dp_size), most = *std::max_element(loads.begin(), loads.end());
    ASSERT_GE(most, bound);
    // Longest first is within 4/3 of the best, and the bound within 2 of it; on such lists both are near.
    ASSERT_LE(3 * most, 4 * 2 * bound);
    const auto l = build_tensor_atomic_layout(shapes, owners, dp_size);
    test::expect_valid(l, 1000);
    for (int64_t r = 0; r < dp_size; ++r) ASSERT_EQ(l.rank_size(r), loads[static_cast<size_t>(r)]);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace fsdp
