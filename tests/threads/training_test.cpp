/// Sharded training equals the unsharded model on the whole batch.
#include <gtest/gtest.h>

#include "support/models.h"

namespace fsdp::testing {
namespace {

struct Named {
  const char* name;
  Placements (*make)(MeshAxis);
};
const Named kStrategies[] = {{"ddp", ddp}, {"zero1", zero1}, {"zero2", zero2}, {"zero3", zero3}};

// behaviours FSH-40, FSH-45: four strategies, 1 to 4 ranks, 1 and 3 microbatches, both ways to clear gradients.
TEST(Training, MatchesUnsharded) {
  for (int64_t ranks : {1, 2, 3, 4})
    for (int64_t micro : {1, 3})
      for (bool set_to_none : {true, false}) {
        const auto reference = reference_run(ranks, 2, 6, micro, set_to_none);
        run_threads(
            ranks,
            [&](std::shared_ptr<World> world) {
              auto mesh = init_device_mesh(world, {ranks}, {"dp"});
              for (const auto& s : kStrategies) {
                const auto run = sharded_run(mesh, s.make("dp"), 2, 6, micro, set_to_none);
                if (difference(reference, run) > 1e-6)
                  throw std::runtime_error(std::string(s.name) + " differs by " +
                                           std::to_string(difference(reference, run)));
              }
            },
            short_timeout());
      }
}

}  // namespace
}  // namespace fsdp::testing
