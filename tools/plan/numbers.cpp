#include "plan/numbers.h"

#include <array>
#include <cstdio>

namespace fsdp::plan {

std::string grouped(int64_t n) {
  const auto digits = std::to_string(n);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && digits[i - 1] != '-' && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string sized(int64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text;
}

std::string counted(int64_t n, const std::string& thing) {
  auto text = grouped(n);
  text.append(" ").append(thing);
  if (n != 1) text += thing.ends_with("ch") ? "es" : "s";
  return text;
}

}  // namespace fsdp::plan
