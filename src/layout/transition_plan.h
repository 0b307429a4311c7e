#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <fsdp/layout.h>
#include <fsdp/placement.h>

/// Which part of a buffer a rank holds, and by what steps a buffer gets from one list of placements to another: for the
/// runtime, and for programs that plan without one.
namespace fsdp::detail {

/// Segments [first, first + count) of a layout that has one per rank of the mesh.
struct Segments {
  int64_t first, count;
};

/// What the rank at `coordinates` holds. Innermost axis first: each sharded axis cuts what is left into equal numbers
/// of segments, so the innermost is the most significant. One entry per axis in all three, outer to inner.
Segments local_segments(std::span<const int64_t> axis_sizes, std::span<const Placement> placements,
                        std::span<const int64_t> coordinates);

/// First element of a segment; the layout's size for the one past the last.
int64_t segment_begin(const GlobalLayout& layout, int64_t segment);

/// One single-axis change of placement.
struct TransitionStep {
  enum class Kind { kAllGather, kReduceScatter, kAllReduce, kSlice, kRelabel };
  Kind kind;
  int64_t axis;                  ///< of the mesh
  std::vector<Placement> after;  ///< placements once the step is done
  double scale = 1.0;            ///< reductions: 1/n for an average
  bool communicates() const { return kind != Kind::kSlice && kind != Kind::kRelabel; }
  bool reduces() const { return kind == Kind::kReduceScatter || kind == Kind::kAllReduce; }
};

/// Single-axis steps, in an order that keeps what a rank holds one contiguous range throughout. Axes of one rank change
/// without a step. ValueError naming the axis for a change that no collective makes.
std::vector<TransitionStep> plan_transition(std::span<const int64_t> axis_sizes,
                                            std::span<const std::string> axis_names, const std::vector<Placement>& from,
                                            const std::vector<Placement>& to);

}  // namespace fsdp::detail
