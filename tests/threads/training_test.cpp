/// Sharded training equals the unsharded model on the whole batch.
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

/// With 1 and 3 microbatches, and both ways to clear gradients.
void expect_unsharded_numbers(const std::vector<int64_t>& shape, const std::vector<NamedPlacements>& strategies) {
  int64_t ranks = 1;
  for (auto s : shape) ranks *= s;
  for (int64_t micro : {1, 3})
    for (bool set_to_none : {true, false}) {
      const auto reference = reference_run(ranks, 2, 6, micro, set_to_none);
      on_mesh(shape, [&](const DeviceMesh& mesh) {
        for (const auto& s : strategies)
          EXPECT_LT(difference(reference, sharded_run(mesh, s.placements, 2, 6, micro, set_to_none)), 1e-6)
              << s.name << " on " << ranks << " ranks, microbatches " << micro << ", set_to_none " << set_to_none;
      });
    }
}

// behaviours FSH-40, FSH-45: four strategies, 1 to 4 ranks.
TEST(Training, MatchesUnsharded) {
  for (int64_t ranks : {1, 2, 3, 4}) expect_unsharded_numbers({ranks}, one_axis());
}

// Hybrid strategies; the outer axis may be of size one, and so may the inner.
TEST(Training, HSD01_HSD02_HybridStrategiesMatchUnsharded) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 2}, {2, 1}, {1, 2}})
    expect_unsharded_numbers(shape, two_axes());
}

}  // namespace
}  // namespace fsdp::testing
