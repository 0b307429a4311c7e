#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fsdp/layout.h>
#include <fsdp/placement.h>

#include "layout/transition_plan.h"

/// A data-parallel mesh without the processes. What a rank holds and how placements change is the runtime's own rule.
namespace fsdp::plan {

struct Mesh {
  std::vector<int64_t> shape;     ///< outer to inner; ranks count row by row
  std::vector<std::string> axes;  ///< one name per axis

  int64_t size() const;
  int64_t ndim() const { return static_cast<int64_t>(shape.size()); }
  /// Place of a rank along an axis.
  int64_t coordinate(int64_t rank, int64_t axis) const;
  /// "8 x 64 (outer x inner)"
  std::string text() const;
};

/// Axes "dp", or "outer" and "inner". ValueError: no axis or more than two, an axis below 1, more than 2^20 ranks.
Mesh make_mesh(std::vector<int64_t> shape);
/// "512", "8x64" or "8,64".
Mesh parse_mesh(std::string_view text);

/// Elements [begin, end) of a group's buffer.
struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool covers(const Range& inner) const { return begin <= inner.begin && inner.end <= end; }
  friend bool operator==(const Range&, const Range&) = default;
};

using detail::Segments;
Segments local_segments(const Mesh&, std::span<const Placement>, int64_t rank);
Range local_range(const Mesh&, std::span<const Placement>, const GlobalLayout&, int64_t rank);

using Step = detail::TransitionStep;
/// As detail::plan_transition.
std::vector<Step> transition(const Mesh&, const std::vector<Placement>& from, const std::vector<Placement>& to);

}  // namespace fsdp::plan
