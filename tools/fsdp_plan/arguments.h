#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace fsdp::plan {

/// What the command line asks for.
struct Arguments {
  bool help = false;
  std::vector<std::string> model;
  std::optional<Dtype> dtype;
  std::string strategy;
  Options options;
  std::optional<int64_t> rank;
  std::optional<int64_t> gpu_memory;  ///< bytes that may be used: what is reserved is taken off
  bool json = false;
  std::string svg;  ///< file, or empty
};

/// ValueError naming the option for anything it does not understand.
Arguments parse_arguments(const std::vector<std::string>& words);
std::string usage();

}  // namespace fsdp::plan
