#include "distributed/shm/reduce.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include <c10/util/Exception.h>

namespace fsdp::detail::shm {
namespace {

/// How an element is kept in memory and what it is summed in.
template <class T>
struct Plain {
  using Stored = T;
  using Sum = T;
  static Sum load(Stored v) { return v; }
  static Stored store(Sum v) { return v; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Sum = float;
  static Sum load(Stored v) { return std::bit_cast<float>(static_cast<uint32_t>(v) << 16); }
  static Stored store(Sum v) {
    const auto bits = std::bit_cast<uint32_t>(v);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    return static_cast<Stored>(v != v ? 0x7fc0u : rounded);
  }
};

struct Half {
  using Stored = _Float16;
  using Sum = float;
  static Sum load(Stored v) { return static_cast<float>(v); }
  static Stored store(Sum v) { return static_cast<Stored>(v); }
};

template <class T>
T wrapping_add(T a, T b) {
  if constexpr (std::is_same_v<T, bool>)
    return a || b;
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
  else
    return a + b;
}

struct Add {
  template <class T>
  static T join(T a, T b) {
    return wrapping_add(a, b);
  }
};
// A NaN on either side is the result, as in torch.
struct Least {
  template <class T>
  static T join(T a, T b) {
    return b < a || b != b ? b : a;
  }
};
struct Greatest {
  template <class T>
  static T join(T a, T b) {
    return b > a || b != b ? b : a;
  }
};

/// Blocks stay in the first-level cache while the parts are added to them one after the other, so each part is read
/// from memory once and the result written once.
constexpr size_t kBlock = 2048;

template <class E, class Op>
[[gnu::always_inline]] inline void reduce_blocks(double scale, std::span<const std::byte* const> parts, std::byte* out,
                                                 size_t count) {
  using Stored = typename E::Stored;
  using Sum = typename E::Sum;
  const auto part = [&](size_t r) { return reinterpret_cast<const Stored*>(parts[r]); };
  const auto factor = static_cast<Sum>(scale);
  const size_t last = parts.size() - 1;
  Sum sum[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    const Stored* a = part(0) + begin;
    const Stored* z = part(last) + begin;
    Stored* to = reinterpret_cast<Stored*>(out) + begin;
    // `to` may be `a` or `z`, element by element: no iteration depends on another.
    if (last == 1) {
      if (scale == 1.0) {
#pragma GCC ivdep
        for (size_t i = 0; i < n; ++i) to[i] = E::store(Op::join(E::load(a[i]), E::load(z[i])));
      } else {
#pragma GCC ivdep
        for (size_t i = 0; i < n; ++i)
          to[i] = E::store(static_cast<Sum>(Op::join(E::load(a[i]), E::load(z[i])) * factor));
      }
      continue;
    }
    const Stored* b = part(1) + begin;
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) sum[i] = Op::join(E::load(a[i]), E::load(b[i]));
    for (size_t r = 2; r < last; ++r) {
      const Stored* p = part(r) + begin;
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) sum[i] = Op::join(sum[i], E::load(p[i]));
    }
    if (scale == 1.0) {
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) to[i] = E::store(Op::join(sum[i], E::load(z[i])));
    } else {
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) to[i] = E::store(static_cast<Sum>(Op::join(sum[i], E::load(z[i])) * factor));
    }
  }
}

// The build's baseline has neither wide vectors nor conversions of fp16.
#if defined(__x86_64__)
template <class E, class Op>
[[gnu::target("avx2,f16c")]] void reduce_avx2(double scale, std::span<const std::byte* const> parts, std::byte* out,
                                              size_t count) {
  reduce_blocks<E, Op>(scale, parts, out, count);
}
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has;
}
#endif

template <class E, class Op>
void reduce_any(double scale, std::span<const std::byte* const> parts, std::byte* out, size_t count) {
#if defined(__x86_64__)
  if (has_avx2()) return reduce_avx2<E, Op>(scale, parts, out, count);
#endif
  reduce_blocks<E, Op>(scale, parts, out, count);
}

using Kernel = void (*)(double, std::span<const std::byte* const>, std::byte*, size_t);

template <class E>
Kernel kernel_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return reduce_any<E, Least>;
    case ReduceOp::kMax:
      return reduce_any<E, Greatest>;
    default:
      return reduce_any<E, Add>;
  }
}

/// Null for a type that has no sum.
Kernel kernel(at::ScalarType dtype, ReduceOp op) {
  switch (dtype) {
    case at::kFloat:
      return kernel_of<Plain<float>>(op);
    case at::kDouble:
      return kernel_of<Plain<double>>(op);
    case at::kBFloat16:
      return kernel_of<BFloat16>(op);
    case at::kHalf:
      return kernel_of<Half>(op);
    case at::kByte:
      return kernel_of<Plain<uint8_t>>(op);
    case at::kChar:
      return kernel_of<Plain<int8_t>>(op);
    case at::kShort:
      return kernel_of<Plain<int16_t>>(op);
    case at::kInt:
      return kernel_of<Plain<int32_t>>(op);
    case at::kLong:
      return kernel_of<Plain<int64_t>>(op);
    case at::kBool:
      return kernel_of<Plain<bool>>(op);
    default:
      return nullptr;
  }
}

}  // namespace

bool reducible(at::ScalarType dtype) { return kernel(dtype, ReduceOp::kSum) != nullptr; }

void reduce(at::ScalarType dtype, ReduceOp op, double scale, std::span<const std::byte* const> parts, std::byte* out,
            size_t count) {
  TORCH_INTERNAL_ASSERT(parts.size() > 1);
  kernel(dtype, op)(scale, parts, out, count);
}

}  // namespace fsdp::detail::shm
