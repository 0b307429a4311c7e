#include <string>

#include <fsdp/layout.h>

#include "layout/checked.h"

namespace fsdp {

GlobalLayout build_tensor_atomic_layout(std::span<const Shape> shapes, std::span<const int64_t> owners,
                                        int64_t dp_size) {
  if (dp_size < 1) throw ValueError("expected at least one rank, got dp_size " + std::to_string(dp_size));
  if (owners.size() != shapes.size())
    throw ValueError("expected one owner per tensor (" + std::to_string(shapes.size()) + "), got " +
                     std::to_string(owners.size()));
  std::vector<int64_t> load(static_cast<size_t>(dp_size) + 1, 0), sizes;
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (owners[i] < 0 || owners[i] >= dp_size)
      throw ValueError("tensor " + std::to_string(i) + ": owner " + std::to_string(owners[i]) + " is not one of the " +
                       std::to_string(dp_size) + " ranks");
    // First, and apart: it refuses a shape without a dimension 0, and arguments are evaluated in any order.
    const int64_t row = detail::row_elements(shapes[i]);
    sizes.push_back(detail::checked_mul(row, shapes[i][0], "tensor size"));
    load[owners[i] + 1] = detail::checked_add(load[owners[i] + 1], sizes[i], "segment size");
  }
  for (size_t r = 1; r < load.size(); ++r) load[r] = detail::checked_add(load[r], load[r - 1], "size");
  const int64_t size = load.back();
  load.pop_back();
  auto next = load;
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < shapes.size(); ++i) {
    offsets.push_back(next[owners[i]]);
    next[owners[i]] += sizes[i];
  }
  return GlobalLayout({shapes.begin(), shapes.end()}, std::move(offsets), size, std::move(load));
}

}  // namespace fsdp
