#include "layout/shard_sizes.h"

#include <algorithm>
#include <map>

namespace fsdp::detail {

namespace {
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

/// 0 stands for "beyond 64 bits", a multiple of everything.
int64_t lcm_or_zero(int64_t a, int64_t b) {
  int64_t r;
  return a == 0 || __builtin_mul_overflow(a / std::gcd(a, b), b, &r) ? 0 : r;
}
}  // namespace

int64_t least_shard_for_one_cut(int64_t size, int64_t unit) {
  // A shard of k units and a rest takes k units before the cut, and k units and the rest behind it.
  const __int128 n = size, k = (n + unit) / (2 * static_cast<__int128>(unit));
  return static_cast<int64_t>(k * unit + std::max<__int128>(0, n - 2 * k * unit));
}

ShardSizes::ShardSizes(std::span<const Kind> kinds, int64_t dp_size) {
  int64_t payload = 0, largest_unit = 0;
  std::map<int64_t, int64_t, std::greater<>> modulus_below;  // threshold: lcm of the units it forces below it
  for (const auto& k : kinds) {
    const auto copies = static_cast<int64_t>(k.tensors.size());
    payload = checked_add(payload, checked_mul(k.size, copies, "payload"), "payload");
    largest_unit = std::max(largest_unit, k.unit);
    auto& m = modulus_below.try_emplace(least_shard_for_one_cut(k.size, k.unit), 1).first->second;
    m = lcm_or_zero(m, k.unit);
  }
  const int64_t least = std::max(ceil_div(payload, dp_size), largest_unit);
  int64_t until = kMax, modulus = 1;
  for (const auto& [threshold, units] : modulus_below) {
    if (threshold < until && until > least) {
      if (modulus != 0) steps_.push_back({std::max(threshold, least), until, modulus});
      until = threshold;
    }
    modulus = lcm_or_zero(modulus, units);
  }
  if (until > least && modulus != 0) steps_.push_back({least, until, modulus});
  std::reverse(steps_.begin(), steps_.end());
}

std::optional<int64_t> ShardSizes::next(int64_t from) const {
  for (const auto& s : steps_) {
    const int64_t at_least = std::max(from, s.from);
    const int64_t units = ceil_div(at_least, s.modulus);
    if (units <= kMax / s.modulus && units * s.modulus < s.until) return units * s.modulus;
  }
  return std::nullopt;
}

std::vector<ShardSizes::Progression> ShardSizes::progressions() const {
  std::vector<Progression> all;
  for (const auto& s : steps_)
    if (all.empty() || all.back().modulus != s.modulus) all.push_back({s.modulus, s.from});
  return all;
}

}  // namespace fsdp::detail
