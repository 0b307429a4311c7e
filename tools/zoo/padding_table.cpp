#include "zoo/padding_table.h"

#include <array>
#include <cstdio>
#include <ostream>
#include <sstream>

#include <fsdp/buffer_split.h>

#include "zoo/model_zoo.h"
#include "zoo/reference_planner.h"

namespace fsdp::zoo {

namespace {

constexpr std::array<int64_t, 6> kRanks{8, 64, 512, 1024, 4096, 16384};

std::string percent(int64_t size, int64_t payload) {
  const double p = 100.0 * static_cast<double>(size - payload) / static_cast<double>(payload);
  char text[32];
  std::snprintf(text, sizeof text, p < 100 ? "%.2f" : "%.0f", p);
  return text;
}

/// "python / one buffer / split", with the number of buffers and, at 1% or more, what the bound says.
void write_cell(std::ostream& out, const std::vector<Shape>& shapes, int64_t dp_size) {
  const auto one = build_row_atomic_layout(shapes, dp_size);
  const BufferSplitOptions options{.min_saving = 0};
  const auto split = plan_buffers(shapes, dp_size, options);
  const int64_t payload = one.payload();
  out << ' ' << percent(reference::padded_size(shapes, dp_size), payload) << " / " << percent(one.size, payload)
      << " / " << percent(split.size(), payload);
  if (split.buffers.size() > 1) out << " (" << split.buffers.size() << ')';
  if (split.padding_ratio() >= 0.01) {
    const int64_t bound = buffer_split_lower_bound(shapes, dp_size, options);
    if (bound == split.size()) {
      out << " =";
    } else {
      out << " ≥ " << percent(bound, payload);
    }
  }
  out << " |";
}

}  // namespace

std::string padding_table() {
  std::ostringstream out;
  out << "| model | unit | payload |";
  for (int64_t r : kRanks) out << ' ' << r << " |";
  out << "\n|---|---|---|";
  for (size_t i = 0; i < kRanks.size(); ++i) out << "---|";
  out << '\n';
  for (const auto& model : models())
    for (const auto& unit : model.units) {
      out << "| " << model.name << " | " << unit.name;
      if (unit.count > 1) out << " × " << unit.count;
      out << " | " << build_row_atomic_layout(unit.shapes, 1).payload() << " |";
      for (int64_t r : kRanks) write_cell(out, unit.shapes, r);
      out << '\n';
    }
  return out.str();
}

}  // namespace fsdp::zoo
