#pragma once

#include <cstdint>
#include <numeric>
#include <string>

#include <fsdp/error.h>
#include <fsdp/layout.h>

namespace fsdp::detail {

[[noreturn]] inline void overflow(const char* what) {
  throw ValueError(std::string("the layout's ") + what +
                   " does not fit in 64 bits: use fewer or smaller tensors per unit");
}

inline int64_t checked_add(int64_t a, int64_t b, const char* what) {
  int64_t r;
  if (__builtin_add_overflow(a, b, &r)) overflow(what);
  return r;
}

inline int64_t checked_mul(int64_t a, int64_t b, const char* what) {
  int64_t r;
  if (__builtin_mul_overflow(a, b, &r)) overflow(what);
  return r;
}

inline int64_t round_up(int64_t value, int64_t unit, const char* what) {
  return checked_mul(checked_add(value, unit - 1, what) / unit, unit, what);
}

inline int64_t checked_lcm(int64_t a, int64_t b, const char* what) { return checked_mul(a / std::gcd(a, b), b, what); }

/// "(3, 4)"
inline std::string shape_text(const Shape& shape) {
  std::string s = "(";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + ")";
}

/// Elements of one row. ValueError for a shape that has no rows.
inline int64_t row_elements(const Shape& shape) {
  if (shape.empty()) throw ValueError("a zero-dimensional shape has no rows to shard; plan it as shape (1)");
  int64_t n = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 0 || (i > 0 && shape[i] == 0))
      throw ValueError("shape " + shape_text(shape) + ": dimension " + std::to_string(i) + " is " +
                       std::to_string(shape[i]) + "; only the leading dimension may be zero, and none negative");
    if (i > 0) n = checked_mul(n, shape[i], "row size");
  }
  return n;
}

}  // namespace fsdp::detail
