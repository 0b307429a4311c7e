#pragma once

#include <cstddef>
#include <span>

#include <c10/core/ScalarType.h>

#include <fsdp/placement.h>

namespace fsdp::detail::shm {

/// True for fp64, fp32, bf16, fp16, integers and bool.
bool reducible(at::ScalarType dtype);

/// out[i] = scale * (parts[0][i] + parts[1][i] + ...), or the least or greatest of them, for `count` elements. Added in
/// this order, bf16 and fp16 in fp32 and rounded once; integers wrap. `out` may be one of the parts. There are at least
/// two parts; scale is 1 unless the type is floating.
void reduce(at::ScalarType dtype, ReduceOp op, double scale, std::span<const std::byte* const> parts, std::byte* out,
            size_t count);

}  // namespace fsdp::detail::shm
