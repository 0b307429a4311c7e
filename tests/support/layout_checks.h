#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <fsdp/layout.h>

/// What must hold of every layout, checked without the library's own queries except rows() and rank_size(), which are
/// checked with it.
namespace fsdp::test {

inline int64_t row_of(const Shape& s) {
  int64_t n = 1;
  for (size_t d = 1; d < s.size(); ++d) n *= s[d];
  return n;
}

/// Tensors in bounds and apart, every row in exactly one segment, blocks of `block` rows whole.
inline void expect_valid(const GlobalLayout& l, int64_t block = 1) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (size_t t = 0; t < l.tensor_shapes.size(); ++t) {
    const int64_t begin = l.tensor_to_offset[t], n = l.tensor_shapes[t][0] * row_of(l.tensor_shapes[t]);
    ASSERT_GE(begin, 0) << "tensor " << t;
    ASSERT_LE(begin + n, l.size) << "tensor " << t;
    if (n > 0) ranges.emplace_back(begin, begin + n);
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) ASSERT_LE(ranges[i - 1].second, ranges[i].first) << "tensors overlap";

  const auto segments = static_cast<int64_t>(l.rank_to_offset.size());
  int64_t at = 0;
  for (int64_t s = 0; s < segments; ++s) {
    ASSERT_EQ(l.rank_to_offset[s], at) << "segment " << s;
    ASSERT_GE(l.rank_size(s), 0) << "segment " << s;
    at += l.rank_size(s);
  }
  ASSERT_EQ(at, l.size);

  for (size_t t = 0; t < l.tensor_shapes.size(); ++t) {
    const int64_t begin = l.tensor_to_offset[t], row = row_of(l.tensor_shapes[t]), rows = l.tensor_shapes[t][0];
    int64_t next = 0;
    for (int64_t s = 0; s < segments; ++s) {
      const auto r = l.rows(static_cast<int64_t>(t), s);
      ASSERT_LE(r.begin, r.end);
      if (r.begin == r.end) continue;
      ASSERT_EQ(r.begin, next) << "tensor " << t << " segment " << s;
      ASSERT_GE(begin + r.begin * row, l.rank_to_offset[s]) << "tensor " << t << " segment " << s;
      ASSERT_LE(begin + r.end * row, l.rank_to_offset[s] + l.rank_size(s)) << "tensor " << t << " segment " << s;
      ASSERT_TRUE(r.end == rows || r.end % block == 0)
          << "tensor " << t << " segment " << s << " ends at row " << r.end;
      next = r.end;
    }
    ASSERT_EQ(next, rows) << "tensor " << t;
  }
}

}  // namespace fsdp::test
