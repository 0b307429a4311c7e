#include <fsdp/owner_plan.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "zoo/model_zoo.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(OwnerPlan, LongestFirstTiesByRankThenOrder) {
  EXPECT_THAT(assign_owners(std::vector<int64_t>{5, 5, 5, 5}, 3), ElementsAre(0, 1, 2, 0));
  EXPECT_THAT(assign_owners(std::vector<int64_t>{2, 3, 3}, 2), ElementsAre(0, 0, 1));
}

TEST(OwnerPlan, FillsUpToALimitWhereTheLeastLoadedRankIsNotGood) {
  // To the least loaded: 7 | 6, 5 to the second (11), 4 to the first (11), 3 to the first: 14 | 11. Up to 13: 7 + 6
  // | 12.
  const std::vector<int64_t> costs{3, 4, 5, 6, 7};
  const auto owners = assign_owners(costs, 2);
  EXPECT_THAT(owners, ElementsAre(1, 1, 1, 0, 0));
  EXPECT_THAT(owner_loads(costs, owners, 2), ElementsAre(13, 12));
}

TEST(OwnerPlan, CostIsTheCallers) {
  const std::vector<Shape> shapes{{8, 1}, {2, 2}, {2, 2}};
  EXPECT_THAT(assign_owners(shapes, 2), ElementsAre(0, 1, 1));
  EXPECT_THAT(assign_owners(shapes, 2, [](const Shape& s) { return s[1]; }), ElementsAre(0, 0, 1));
  EXPECT_EQ(element_cost({3, 4, 5}), 60);
  EXPECT_EQ(element_cost({}), 1);
  EXPECT_EQ(newton_schulz_cost({4, 6}), 4 * 4 * 6 * 2 + 4 * 4 * 4);
  EXPECT_EQ(newton_schulz_cost({6, 4}), newton_schulz_cost({4, 6}));
  EXPECT_EQ(newton_schulz_cost({6, 2, 2}), newton_schulz_cost({6, 4}));
  EXPECT_EQ(newton_schulz_cost({6}), 6);
  EXPECT_EQ(newton_schulz_cost({0, 4}), 0);
}

TEST(OwnerPlan, LowerBounds) {
  EXPECT_EQ(owner_load_lower_bound({}, 3), 0);
  EXPECT_EQ(owner_load_lower_bound(std::vector<int64_t>{1, 1, 1, 9}, 3), 9) << "the costliest";
  EXPECT_EQ(owner_load_lower_bound(std::vector<int64_t>{4, 4, 4, 4}, 3), 8) << "two of four on one rank";
  EXPECT_EQ(owner_load_lower_bound(std::vector<int64_t>{1, 2, 3, 4}, 2), 5) << "the mean";
  EXPECT_EQ(owner_load_lower_bound(std::vector<int64_t>(7, 2), 3), 6) << "three of seven on one rank";
}

TEST(OwnerPlan, RefusesWrongArguments) {
  EXPECT_THROW(assign_owners(std::vector<int64_t>{1}, 0), ValueError);
  EXPECT_THROW(owner_load_lower_bound(std::vector<int64_t>{1}, 0), ValueError);
  try {
    assign_owners(std::vector<int64_t>{1, -2}, 2);
    FAIL();
  } catch (const ValueError& e) {
    EXPECT_THAT(e.what(), HasSubstr("tensor 1: expected a cost of at least 0, got -2"));
  }
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_THROW(assign_owners(std::vector<int64_t>{most, 1}, 2), ValueError);
  EXPECT_THROW(owner_loads(std::vector<int64_t>{1}, std::vector<int64_t>{2}, 2), ValueError);
  EXPECT_THROW(owner_loads(std::vector<int64_t>{1}, std::vector<int64_t>{}, 2), ValueError);
  EXPECT_THROW(element_cost({2, -1}), ValueError);
  EXPECT_THROW(element_cost({most, 2}), ValueError);
}

// All matrices of a whole model, as a matrix optimizer sees them.
TEST(OwnerPlan, BalancedOverTheUnitsOfAModel) {
  for (const auto& model : zoo::models()) {
    std::vector<Shape> matrices;
    for (const auto& unit : model.units)
      for (int64_t i = 0; unit.is_block && i < unit.count; ++i)
        for (const auto& s : unit.shapes)
          if (s.size() >= 2) matrices.push_back(s);
    for (int64_t dp_size : {2, 8, 64}) {
      for (const auto& cost : {element_cost, newton_schulz_cost}) {
        std::vector<int64_t> costs;
        for (const auto& s : matrices) costs.push_back(cost(s) / 1024);
        const auto owners = assign_owners(costs, dp_size);
        const auto loads = owner_loads(costs, owners, dp_size);
        const auto most = static_cast<double>(*std::max_element(loads.begin(), loads.end()));
        const auto bound = static_cast<double>(owner_load_lower_bound(costs, dp_size));
        EXPECT_LE(most, 1.05 * bound) << model.name << ", " << dp_size << " ranks";
      }
    }
  }
}

}  // namespace
}  // namespace fsdp
