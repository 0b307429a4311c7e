#include <fsdp/buffer_split.h>

#include "layout/items.h"
#include "layout/split_covering.h"

namespace fsdp {

/// Less than a second.
constexpr int64_t kSteps = 50'000'000;

int64_t buffer_split_lower_bound(std::span<const Shape> shapes, int64_t dp_size, const BufferSplitOptions& options) {
  const int64_t known = plan_buffers(shapes, dp_size, options).size() / dp_size;
  const auto items = detail::items_of(shapes, options.block_size);
  detail::SplitCovering covering(items, dp_size, known, options.max_buffers, kSteps);
  if (!covering.is_tractable()) return covering.mean() * dp_size;
  const auto smaller = covering.smallest(detail::SplitCovering::Doubt::kFits, 0);
  return (smaller ? smaller->total : known) * dp_size;
}

}  // namespace fsdp
