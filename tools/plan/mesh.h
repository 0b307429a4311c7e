#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fsdp/layout.h>
#include <fsdp/placement.h>

/// A data-parallel mesh without the processes: which part of a buffer a rank holds, and by what collectives a buffer
/// gets from one list of placements to another. Written apart from the library's runtime, and compared with it by
/// tests.
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

/// Segments [first, first + count) of a layout of mesh.size() segments that a rank holds. Inner-major: the innermost
/// sharded axis cuts first.
struct Segments {
  int64_t first = 0, count = 0;
};
Segments local_segments(const Mesh&, std::span<const Placement>, int64_t rank);
Range local_range(const Mesh&, std::span<const Placement>, const GlobalLayout&, int64_t rank);

/// One change of placement along one axis; axes of one rank change without a step.
struct Step {
  enum class Kind { kAllGather, kReduceScatter, kAllReduce, kSlice, kRelabel };
  Kind kind;
  int64_t axis;
  std::vector<Placement> after;
  bool communicates() const { return kind != Kind::kSlice && kind != Kind::kRelabel; }
  bool reduces() const { return kind == Kind::kReduceScatter || kind == Kind::kAllReduce; }
};

/// ValueError naming the axis for a change that no collective makes.
std::vector<Step> transition(const Mesh&, const std::vector<Placement>& from, const std::vector<Placement>& to);

}  // namespace fsdp::plan
