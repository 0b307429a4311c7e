#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <fsdp/layout.h>

#include "layout/checked.h"

namespace fsdp::detail {

/// One tensor as the planner sees it. A cut may fall into it only after a whole number of units: a unit is a row, or a
/// block of rows, in elements. The last unit may be short.
struct Item {
  size_t index = 0;
  int64_t size = 0, unit = 1;
};

/// Tensors alike in size and unit are interchangeable: the search treats them as one kind.
struct Kind {
  int64_t size = 0, unit = 1;
  std::vector<size_t> tensors;
};

/// A place for every tensor when cuts fall on the multiples of `shard`.
struct PaddedPlan {
  std::vector<int64_t> offsets;
  int64_t shard = 0;
};

inline std::vector<Item> items_of(std::span<const Shape> shapes, int64_t block_size) {
  std::vector<Item> items;
  items.reserve(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    const int64_t row = row_elements(shapes[i]);
    const int64_t size = checked_mul(row, shapes[i][0], "tensor size");
    // A block longer than the tensor is the tensor.
    const int64_t rows = std::max<int64_t>(1, std::min(block_size, shapes[i][0]));
    items.push_back({i, size, checked_mul(row, rows, "block size")});
  }
  return items;
}

inline int64_t payload_of(std::span<const Item> items) {
  int64_t n = 0;
  for (const auto& t : items) n = checked_add(n, t.size, "payload");
  return n;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/// Kinds in order of first appearance, tensors in logical order within each; tensors without elements are left out.
std::vector<Kind> kinds_of(std::span<const Item> items);

/// The layout of the Python planner: tensors on multiples of the least common multiple of all units, gaps behind them
/// filled with a tensor that ends on the next multiple and then with small ones. Wastes space where that multiple is
/// large; serves as the upper bound of the search. ValueError when the multiple or the size overflows.
PaddedPlan plan_by_chunk(std::span<const Item> items, int64_t dp_size);

}  // namespace fsdp::detail
