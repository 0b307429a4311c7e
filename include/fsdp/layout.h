#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <fsdp/error.h>

/// The planner: where each tensor of a group lies in one flat buffer, and where that buffer is cut
/// into one segment per rank. Pure C++: no LibTorch, no communication; the result depends on its
/// arguments only, so every rank computes the same one.
namespace fsdp {

using Shape = std::vector<int64_t>;

enum class ShardLayout {
  kPadded,    ///< equal segments; gaps and the tail are padding
  kUnpadded,  ///< no padding; segments differ in size and may be empty
};

/// Placement of a list of tensors in one flat buffer of `size` elements, cut into segments.
/// A tensor's *rows* are its slices along dimension 0; no segment boundary lies inside a row.
/// Validated by its constructor and not meant to be changed afterwards. Thread safe (read only).
struct GlobalLayout {
  /// Throws ValueError unless: the three vectors agree in length where they must, every offset is
  /// in bounds, no two non-empty tensors overlap, segments ascend from 0 and every segment boundary
  /// that falls into a tensor falls between two of its rows.
  GlobalLayout(std::vector<Shape> tensor_shapes, std::vector<int64_t> tensor_to_offset, int64_t size,
               std::vector<int64_t> rank_to_offset);

  std::vector<Shape> tensor_shapes;       ///< logical order
  std::vector<int64_t> tensor_to_offset;  ///< element offset of each tensor in the global buffer
  int64_t size;                           ///< elements, padding included
  std::vector<int64_t> rank_to_offset;    ///< first element of each rank's segment; one per rank

  struct Rows {
    int64_t begin = 0, end = 0;
    friend bool operator==(const Rows&, const Rows&) = default;
  };

  /// Elements in segment `segment`.
  int64_t rank_size(int64_t segment) const;
  /// Rows of `tensor` that lie in `segment`; begin == end when there are none.
  Rows rows(int64_t tensor, int64_t segment) const;
  /// Rows of `tensor` that lie in the element range [begin, end) of the global buffer. StateError if
  /// the range splits a row.
  Rows rows_in(int64_t tensor, int64_t begin, int64_t end) const;

  int64_t num_tensors() const { return static_cast<int64_t>(tensor_shapes.size()); }
  int64_t num_segments() const { return static_cast<int64_t>(rank_to_offset.size()); }
  /// Elements of one row of `tensor` (1 for a one-dimensional tensor).
  int64_t row_size(int64_t tensor) const;
  /// Elements of `tensor`.
  int64_t numel(int64_t tensor) const;
  /// Sum of all tensors' elements: `size` less the padding.
  int64_t payload() const;
  /// Padding over payload: 0 without padding, 1 when the buffer is twice the tensors. 0 for an empty buffer.
  double padding_ratio() const;
  bool equal_segments() const;

  friend bool operator==(const GlobalLayout&, const GlobalLayout&) = default;
};

/// Plans rows (or blocks of `block_size` rows) whole on one rank. Padded: all segments equal, `size`
/// never above dp_size x payload, nor above a plan that puts every tensor on multiples of the least
/// common multiple of all rows; a tensor need not lie where its place in the list suggests.
/// Unpadded: size == payload, logical order, no segment above ceil(mean) + the largest row (block). Blocks count from
/// row 0 of each tensor; the last may be short. ValueError: dp_size < 1, block_size < 1, a zero-dimensional shape, a
/// zero non-leading dimension, a negative dimension, or a size that overflows 64 bits.
GlobalLayout build_row_atomic_layout(std::span<const Shape> shapes, int64_t dp_size, int64_t block_size = 1,
                                     ShardLayout layout = ShardLayout::kPadded);

/// No padded plan of these tensors in one buffer is smaller. Not always reached: it asks that the mean and the largest
/// row (block) fit in a segment, and that the rows (blocks) of every tensor that must be cut twice or more divide it.
/// ValueError as above.
int64_t row_atomic_lower_bound(std::span<const Shape> shapes, int64_t dp_size, int64_t block_size = 1);

/// Plans every tensor whole in the segment of its owner (`owners[i]` in [0, dp_size)), in logical
/// order within each owner; segments are unequal.
GlobalLayout build_tensor_atomic_layout(std::span<const Shape> shapes, std::span<const int64_t> owners,
                                        int64_t dp_size);

}  // namespace fsdp
