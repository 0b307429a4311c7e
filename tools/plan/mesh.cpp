#include "plan/mesh.h"

#include <charconv>

#include <fsdp/error.h>

namespace fsdp::plan {

namespace {
constexpr int64_t kMostRanks = int64_t{1} << 20;
}  // namespace

int64_t Mesh::size() const {
  int64_t n = 1;
  for (auto s : shape) n *= s;
  return n;
}

int64_t Mesh::coordinate(int64_t rank, int64_t axis) const {
  for (int64_t i = ndim() - 1; i > axis; --i) rank /= shape[i];
  return rank % shape[axis];
}

std::string Mesh::text() const {
  if (ndim() == 1) return std::to_string(shape[0]) + " (" + axes[0] + ")";
  return std::to_string(shape[0]) + " x " + std::to_string(shape[1]) + " (" + axes[0] + " x " + axes[1] + ")";
}

Mesh make_mesh(std::vector<int64_t> shape) {
  if (shape.empty() || shape.size() > 2)
    throw ValueError("mesh: expected one or two axes, got " + std::to_string(shape.size()));
  int64_t ranks = 1;
  for (auto s : shape) {
    if (s < 1) throw ValueError("mesh: expected at least one rank per axis, got " + std::to_string(s));
    if (s > kMostRanks / ranks)
      throw ValueError("mesh: expected at most " + std::to_string(kMostRanks) + " ranks in all");
    ranks *= s;
  }
  std::vector<std::string> axes{"dp"};
  if (shape.size() == 2) axes = {"outer", "inner"};
  return {std::move(shape), std::move(axes)};
}

Mesh parse_mesh(std::string_view text) {
  std::vector<int64_t> shape;
  const char *at = text.data(), *end = text.data() + text.size();
  for (;; ++at) {
    int64_t n = 0;
    const auto [stop, error] = std::from_chars(at, end, n);
    if (error != std::errc() || (stop != end && *stop != 'x' && *stop != ','))
      throw ValueError("mesh \"" + std::string(text) + "\": expected a number of ranks, or two as in 8x64");
    shape.push_back(n);
    at = stop;
    if (at == end) break;
  }
  return make_mesh(std::move(shape));
}

Segments local_segments(const Mesh& mesh, std::span<const Placement> placements, int64_t rank) {
  std::vector<int64_t> coordinates;
  for (int64_t i = 0; i < mesh.ndim(); ++i) coordinates.push_back(mesh.coordinate(rank, i));
  return detail::local_segments(mesh.shape, placements, coordinates);
}

Range local_range(const Mesh& mesh, std::span<const Placement> placements, const GlobalLayout& layout, int64_t rank) {
  const auto s = local_segments(mesh, placements, rank);
  return {detail::segment_begin(layout, s.first), detail::segment_begin(layout, s.first + s.count)};
}

std::vector<Step> transition(const Mesh& mesh, const std::vector<Placement>& from, const std::vector<Placement>& to) {
  return detail::plan_transition(mesh.shape, mesh.axes, from, to);
}

}  // namespace fsdp::plan
