#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include <fsdp/layout.h>

/// The size that the Python planner (Megatron-FSDP's layout.py) gives a buffer, written apart from the library's code:
/// an oracle for tests and the column to compare with in the documents. Small sizes only: nothing is checked for
/// overflow.
namespace fsdp::reference {

inline int64_t row_of(const Shape& s) {
  return std::accumulate(s.begin() + 1, s.end(), int64_t{1}, std::multiplies<>());
}
inline int64_t numel_of(const Shape& s) { return s[0] * row_of(s); }
inline int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

inline int64_t padded_size(const std::vector<Shape>& shapes, int64_t dp_size) {
  int64_t chunk = 1;
  for (const auto& s : shapes) chunk = std::lcm(chunk, row_of(s));
  std::vector<Shape> regular, fragments;
  for (const auto& s : shapes) (numel_of(s) < chunk ? fragments : regular).push_back(s);
  std::stable_sort(fragments.begin(), fragments.end(),
                   [](const Shape& a, const Shape& b) { return numel_of(a) > numel_of(b); });
  int64_t cursor = 0;
  while (!regular.empty()) {
    int64_t gap = cursor + numel_of(regular.front());
    regular.erase(regular.begin());
    cursor = up(gap, chunk);
    if (gap == cursor) continue;
    int64_t gap_end = cursor;
    for (auto it = regular.begin(); it != regular.end(); ++it) {
      const int64_t head = numel_of(*it) % chunk;
      if (head == 0 || head > cursor - gap) continue;
      gap_end = cursor - head;
      cursor += numel_of(*it) - head;
      regular.erase(it);
      break;
    }
    std::vector<Shape> left;
    for (const auto& f : fragments) {
      const int64_t start = up(gap, row_of(f));
      if (start + numel_of(f) <= gap_end) {
        gap = start + numel_of(f);
      } else {
        left.push_back(f);
      }
    }
    fragments = std::move(left);
  }
  for (const auto& f : fragments) cursor = up(cursor, row_of(f)) + numel_of(f);
  return up(cursor, chunk * dp_size);
}

}  // namespace fsdp::reference
