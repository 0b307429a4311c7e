#pragma once

#include <string>

namespace fsdp::testing {

/// What a child process does: the body of one rank. Returns the exit code of the process; writes what happened to
/// standard output, which the test reads.
int run_scenario(const std::string& name);

}  // namespace fsdp::testing
