/// libFuzzer target of the planner, for longer runs than the tests' (clang only):
///   cmake -DCMAKE_CXX_COMPILER=clang++ -DFSDP_BUILD_FUZZERS=ON ... && fsdp_planner_fuzzer -max_total_time=600
/// Bytes are read as: ranks, block size, layout, then per tensor the number of dimensions and the dimensions.
#include <fsdp/buffer_split.h>

#include <cstdlib>
#include <iostream>

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "violated: " << what << "\n";
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const uint8_t* const end = data + size;
  const auto next = [&] { return data < end ? *data++ : uint8_t{0}; };
  const int64_t dp_size = 1 + next(), block = 1 + next() % 40;
  const auto layout = next() % 2 ? fsdp::ShardLayout::kUnpadded : fsdp::ShardLayout::kPadded;
  std::vector<fsdp::Shape> shapes;
  while (data < end && shapes.size() < 32) {
    fsdp::Shape shape(next() % 4);
    // Mostly small dimensions, now and then a power of two that can overflow in company.
    for (auto& d : shape) {
      const int64_t byte = next();
      d = byte < 224 ? byte : int64_t{1} << (byte - 224 + 8);
    }
    shapes.push_back(std::move(shape));
  }
  try {
    // The layout's constructor checks bounds, overlap and whole rows.
    const auto l = fsdp::build_row_atomic_layout(shapes, dp_size, block, layout);
    require(l == fsdp::build_row_atomic_layout(shapes, dp_size, block, layout), "the same plan twice");
    for (int64_t t = 0; t < l.num_tensors(); ++t)
      for (int64_t s = 0; s < l.num_segments(); ++s) {
        const auto rows = l.rows(t, s);
        require(rows.begin == rows.end || rows.end == l.tensor_shapes[t][0] || rows.end % block == 0, "blocks whole");
      }
    if (layout == fsdp::ShardLayout::kPadded) {
      require(l.equal_segments(), "equal segments");
      require(l.payload() == 0 || l.size / dp_size <= l.payload(), "at most everything on every rank");
      require(l.size >= fsdp::row_atomic_lower_bound(shapes, dp_size, block), "the lower bound");
      require(fsdp::plan_buffers(shapes, dp_size, {.block_size = block}).size() <= l.size, "a split is no larger");
    } else {
      require(l.size == l.payload(), "no padding");
    }
  } catch (const fsdp::ValueError&) {
    // Zero-dimensional shapes, inner zero dimensions, overflow.
  }
  return 0;
}
