#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <fsdp/layout.h>

/// Divides one group's tensors among a few buffers where that saves padding: rows of 4096 and of 14336 elements need
/// shards of a common multiple (28672) in one buffer, but divide separately in two. The buffers' collectives go out as
/// one group, so a second buffer costs little; still, it must pay. Pure C++, deterministic, thread safe.
namespace fsdp {

struct BufferSplitOptions {
  int64_t block_size = 1;   ///< rows that stay together, as in build_row_atomic_layout
  int64_t max_buffers = 3;  ///< at least 1
  /// Differences of at most this share of the payload, or of `min_saving` elements per rank, do not matter: among
  /// divisions that come as near to the smallest found, the one with the fewest buffers is taken.
  double tolerance = 0.002;
  int64_t min_saving = 256;
};

struct BufferSplit {
  struct Buffer {
    std::vector<int64_t> tensors;  ///< indices into the list given, ascending
    GlobalLayout layout;           ///< padded, of these tensors in this order
  };
  std::vector<Buffer> buffers;

  /// Elements of all buffers, padding included.
  int64_t size() const;
  /// Elements of all tensors.
  int64_t payload() const;
  /// Padding over payload, 0 for no tensors.
  double padding_ratio() const;
};

/// Every tensor is in exactly one buffer; there is at least one buffer. Never larger than build_row_atomic_layout's one
/// buffer. ValueError as there, and for max_buffers < 1 or a negative or NaN tolerance.
BufferSplit plan_buffers(std::span<const Shape> shapes, int64_t dp_size, const BufferSplitOptions& options = {});

/// No division of these tensors into at most max_buffers buffers of equal segments is smaller in all, whatever is
/// placed where. At least the payload rounded up to whole elements per rank; tighter where few rows lie on a rank,
/// which is where padding is large. ValueError as above.
int64_t buffer_split_lower_bound(std::span<const Shape> shapes, int64_t dp_size,
                                 const BufferSplitOptions& options = {});

}  // namespace fsdp
