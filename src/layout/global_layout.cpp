#include <algorithm>
#include <string>

#include <fsdp/layout.h>

#include "layout/checked.h"

namespace fsdp {

using detail::shape_text;

namespace {

std::string range_text(int64_t begin, int64_t end) {
  return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
}

void check_tensors(const GlobalLayout& l) {
  if (l.size < 0) throw ValueError("expected a size of at least 0, got " + std::to_string(l.size));
  if (l.tensor_shapes.size() != l.tensor_to_offset.size())
    throw ValueError("expected one offset per tensor (" + std::to_string(l.tensor_shapes.size()) + "), got " +
                     std::to_string(l.tensor_to_offset.size()));
  std::vector<std::pair<int64_t, size_t>> by_offset;
  for (size_t i = 0; i < l.tensor_shapes.size(); ++i) {
    detail::row_elements(l.tensor_shapes[i]);
    const int64_t n = l.numel(static_cast<int64_t>(i)), at = l.tensor_to_offset[i];
    if (at < 0 || at > l.size || n > l.size - at)
      throw ValueError("tensor " + std::to_string(i) + " " + shape_text(l.tensor_shapes[i]) + " at " +
                       range_text(at, at + n) + " lies outside the buffer of " + std::to_string(l.size) + " elements");
    if (n > 0) by_offset.emplace_back(at, i);
  }
  std::sort(by_offset.begin(), by_offset.end());
  for (size_t k = 1; k < by_offset.size(); ++k) {
    const auto a = by_offset[k - 1].second, b = by_offset[k].second;
    const int64_t end = l.tensor_to_offset[a] + l.numel(static_cast<int64_t>(a));
    if (end > l.tensor_to_offset[b])
      throw ValueError("tensors " + std::to_string(a) + " at " + range_text(l.tensor_to_offset[a], end) + " and " +
                       std::to_string(b) + " at " +
                       range_text(l.tensor_to_offset[b], l.tensor_to_offset[b] + l.numel(static_cast<int64_t>(b))) +
                       " overlap");
  }
}

void check_segments(const GlobalLayout& l) {
  if (l.rank_to_offset.empty() || l.rank_to_offset.front() != 0)
    throw ValueError("expected the segments to begin at element 0");
  for (size_t r = 1; r < l.rank_to_offset.size(); ++r)
    if (l.rank_to_offset[r] < l.rank_to_offset[r - 1] || l.rank_to_offset[r] > l.size)
      throw ValueError("segment " + std::to_string(r) + " begins at " + std::to_string(l.rank_to_offset[r]) +
                       ": segments must ascend within the buffer of " + std::to_string(l.size) + " elements");
  // Equal segments take a constant number of steps per tensor, however many there are.
  const auto count = static_cast<int64_t>(l.rank_to_offset.size());
  const int64_t equal = count > 1 ? l.rank_to_offset[1] : 0;
  bool is_equal = equal > 0;
  for (int64_t r = 0; is_equal && r < count; ++r) is_equal = l.rank_to_offset[r] == r * equal;
  for (size_t i = 0; i < l.tensor_shapes.size(); ++i) {
    const auto t = static_cast<int64_t>(i);
    const int64_t begin = l.tensor_to_offset[i], end = begin + l.numel(t), row = l.row_size(t);
    const auto check_cut = [&](int64_t segment) {
      const int64_t cut = l.rank_to_offset[segment];
      if (cut > begin && cut < end && (cut - begin) % row != 0)
        throw ValueError("the boundary of segment " + std::to_string(segment) + " at element " + std::to_string(cut) +
                         " splits a row of tensor " + std::to_string(i) + " " + shape_text(l.tensor_shapes[i]) +
                         " at " + range_text(begin, end));
    };
    if (is_equal) {
      // Two neighbouring cuts between rows are a whole number of rows apart, and so are all others.
      const int64_t first = begin / equal + 1;
      for (int64_t segment = first; segment < std::min(first + 2, count); ++segment) check_cut(segment);
    } else {
      const auto first = std::upper_bound(l.rank_to_offset.begin(), l.rank_to_offset.end(), begin);
      for (auto it = first; it != l.rank_to_offset.end() && *it < end; ++it) check_cut(it - l.rank_to_offset.begin());
    }
  }
}

}  // namespace

GlobalLayout::GlobalLayout(std::vector<Shape> shapes, std::vector<int64_t> offsets, int64_t total,
                           std::vector<int64_t> segments)
    : tensor_shapes(std::move(shapes)),
      tensor_to_offset(std::move(offsets)),
      size(total),
      rank_to_offset(std::move(segments)) {
  check_tensors(*this);
  check_segments(*this);
}

int64_t GlobalLayout::rank_size(int64_t segment) const {
  if (segment < 0 || segment >= num_segments())
    throw ValueError("segment " + std::to_string(segment) + " is out of range: there are " +
                     std::to_string(num_segments()));
  return (segment + 1 == num_segments() ? size : rank_to_offset[segment + 1]) - rank_to_offset[segment];
}

GlobalLayout::Rows GlobalLayout::rows(int64_t tensor, int64_t segment) const {
  const int64_t n = rank_size(segment);
  return rows_in(tensor, rank_to_offset[segment], rank_to_offset[segment] + n);
}

GlobalLayout::Rows GlobalLayout::rows_in(int64_t tensor, int64_t begin, int64_t end) const {
  const int64_t first = tensor_to_offset.at(tensor), last = first + numel(tensor);
  const int64_t a = std::max(begin, first), b = std::min(end, last);
  if (a >= b) return {};
  const int64_t row = row_size(tensor);
  if ((a - first) % row != 0 || (b - first) % row != 0)
    throw StateError("the range " + range_text(begin, end) + " splits a row of tensor " + std::to_string(tensor) + " " +
                     shape_text(tensor_shapes[tensor]));
  return {(a - first) / row, (b - first) / row};
}

int64_t GlobalLayout::row_size(int64_t tensor) const { return detail::row_elements(tensor_shapes.at(tensor)); }

int64_t GlobalLayout::numel(int64_t tensor) const {
  return detail::checked_mul(tensor_shapes.at(tensor)[0], row_size(tensor), "tensor size");
}

int64_t GlobalLayout::payload() const {
  int64_t n = 0;
  for (int64_t i = 0; i < num_tensors(); ++i) n = detail::checked_add(n, numel(i), "payload");
  return n;
}

double GlobalLayout::padding_ratio() const {
  const int64_t n = payload();
  return n == 0 ? 0.0 : static_cast<double>(size - n) / static_cast<double>(n);
}

bool GlobalLayout::equal_segments() const {
  for (int64_t r = 1; r < num_segments(); ++r)
    if (rank_size(r) != rank_size(0)) return false;
  return true;
}

}  // namespace fsdp
