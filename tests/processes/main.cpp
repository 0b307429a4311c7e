#include <cstdlib>

#include <gtest/gtest.h>

#include "processes/scenarios.h"

/// The tests; or, in a process that a test started, one rank of a scenario.
int main(int argc, char** argv) {
  if (const char* scenario = std::getenv("FSDP_TEST_SCENARIO")) return fsdp::testing::run_scenario(scenario);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
