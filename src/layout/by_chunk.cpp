#include <algorithm>

#include "layout/items.h"

namespace fsdp::detail {

PaddedPlan plan_by_chunk(std::span<const Item> items, int64_t dp_size) {
  int64_t chunk = 1;
  for (const auto& t : items) chunk = checked_lcm(chunk, t.unit, "common row size");
  std::vector<int64_t> offsets(items.size(), 0);
  std::vector<Item> regular, fragments;
  for (const auto& t : items) (t.size < chunk ? fragments : regular).push_back(t);
  std::stable_sort(fragments.begin(), fragments.end(), [](const auto& a, const auto& b) { return a.size > b.size; });

  std::vector<bool> placed(regular.size(), false);
  int64_t cursor = 0;
  for (size_t i = 0; i < regular.size(); ++i) {
    if (placed[i]) continue;
    const auto& t = regular[i];
    offsets[t.index] = cursor;
    int64_t gap_begin = checked_add(cursor, t.size, "size");
    cursor = round_up(gap_begin, chunk, "size");
    if (cursor == gap_begin) continue;
    int64_t gap_end = cursor;
    for (size_t j = i + 1; j < regular.size(); ++j) {
      const auto& partner = regular[j];
      const int64_t head = partner.size % chunk;
      if (placed[j] || head == 0) continue;
      // It ends on a multiple of the chunk, so its head reaches back into the gap. (A short last block moves it
      // further back, to where its whole blocks meet the multiples.)
      const int64_t start = (cursor - head) / partner.unit * partner.unit;
      if (start < gap_begin) continue;
      offsets[partner.index] = start;
      placed[j] = true;
      gap_end = start;
      cursor = round_up(checked_add(start, partner.size, "size"), chunk, "size");
      break;
    }
    std::erase_if(fragments, [&](const Item& f) {
      const int64_t start = round_up(gap_begin, f.unit, "size");
      if (start > gap_end || f.size > gap_end - start) return false;
      offsets[f.index] = start;
      gap_begin = start + f.size;
      return true;
    });
  }
  for (const auto& f : fragments) {
    offsets[f.index] = round_up(cursor, f.unit, "size");
    cursor = checked_add(offsets[f.index], f.size, "size");
  }
  const int64_t size = round_up(cursor, checked_mul(chunk, dp_size, "size"), "size");
  return {std::move(offsets), size / dp_size};
}

}  // namespace fsdp::detail
