#include "plan/mesh.h"

#include <charconv>

#include <fsdp/error.h>

namespace fsdp::plan {

namespace {
constexpr int64_t kMostRanks = int64_t{1} << 20;

int64_t boundary(const GlobalLayout& layout, int64_t segment) {
  return segment == layout.num_segments() ? layout.size : layout.rank_to_offset[segment];
}
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
  Segments s{0, mesh.size()};
  for (int64_t i = mesh.ndim() - 1; i >= 0; --i) {
    if (!is_sharded(placements[i])) continue;
    s.count /= mesh.shape[i];
    s.first += mesh.coordinate(rank, i) * s.count;
  }
  return s;
}

Range local_range(const Mesh& mesh, std::span<const Placement> placements, const GlobalLayout& layout, int64_t rank) {
  const auto s = local_segments(mesh, placements, rank);
  return {boundary(layout, s.first), boundary(layout, s.first + s.count)};
}

std::vector<Step> transition(const Mesh& mesh, const std::vector<Placement>& from, const std::vector<Placement>& to) {
  std::vector<Step> steps;
  auto now = from;
  auto add = [&](Step::Kind kind, int64_t axis) {
    now[axis] = to[axis];
    if (mesh.shape[axis] > 1) steps.push_back({kind, axis, now});
  };
  auto refuse = [&](int64_t axis) {
    throw ValueError("axis '" + mesh.axes[axis] + "': no collective turns " + to_string(now[axis]) + " into " +
                     to_string(to[axis]));
  };
  // What is gathered must lie side by side: the outermost axis, which cuts finest, first.
  for (int64_t i = 0; i < mesh.ndim(); ++i)
    if (is_sharded(now[i]) && is_replicate(to[i]))
      add(Step::Kind::kAllGather, i);
    else if (is_sharded(now[i]) && is_partial(to[i]))
      refuse(i);
  for (int64_t i = mesh.ndim() - 1; i >= 0; --i) {
    if (now[i] == to[i]) continue;
    if (is_partial(now[i]) && is_sharded(to[i]))
      add(Step::Kind::kReduceScatter, i);
    else if (is_partial(now[i]) && is_replicate(to[i]))
      add(Step::Kind::kAllReduce, i);
    else if (is_replicate(now[i]) && is_sharded(to[i]))
      add(Step::Kind::kSlice, i);
    else if (is_replicate(now[i]) && is_partial(to[i]))
      add(Step::Kind::kRelabel, i);
    else
      refuse(i);
  }
  return steps;
}

}  // namespace fsdp::plan
