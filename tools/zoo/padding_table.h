#pragma once

#include <string>

namespace fsdp::zoo {

/// Markdown table of every unit of the zoo at 8 to 16384 ranks: padding of the Python planner, of one buffer, and of up
/// to three, with the lower bound where padding is 1% or more. docs/planner.md holds it, and a test compares.
std::string padding_table();

}  // namespace fsdp::zoo
