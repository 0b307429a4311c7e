#pragma once

#include <optional>
#include <string>

#include "plan/figures.h"
#include "plan/fit.h"

namespace fsdp::plan {

struct Report {
  Plan plan;
  std::string strategy;  ///< as it was asked for
  Figures figures = {};
  bool largest = false;  ///< the rank was chosen for being the largest
  std::vector<std::string> notes = {};
  std::optional<Fit> fit = {};
};

/// For people: sizes in the unit that suits them, and exact.
std::string as_text(const Report&);
/// For programs: integers are bytes or elements; a newline at the end.
std::string as_json(const Report&);

}  // namespace fsdp::plan
