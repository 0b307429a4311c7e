#include <fsdp/buffer_split.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "layout/items.h"
#include "layout/shard_sizes.h"

namespace fsdp {

namespace {

using detail::Item;
using detail::Kind;

/// Divisions of more kinds than this are not enumerated: the smallest kinds are put together first.
constexpr size_t kMaxParts = 8;
/// Divisions planned in full per number of buffers; the others are judged by their lower bound.
constexpr size_t kPlanned = 8;

void check_options(const BufferSplitOptions& o) {
  if (o.max_buffers < 1) throw ValueError("expected max_buffers of at least 1, got " + std::to_string(o.max_buffers));
  if (!(o.tolerance >= 0)) throw ValueError("expected a tolerance of at least 0, got " + std::to_string(o.tolerance));
  if (o.min_saving < 0)
    throw ValueError("expected a min_saving of at least 0 elements, got " + std::to_string(o.min_saving));
}

/// Tensors that go into one buffer together.
struct Part {
  int64_t payload = 0, unit = 1;  // unit: of the largest tensor
  std::vector<Kind> kinds;
};

/// At most kMaxParts parts: kinds, the smallest put together or the largest halved.
std::vector<Part> parts_of(std::span<const Item> items) {
  std::vector<Part> parts;
  for (auto& k : detail::kinds_of(items))
    parts.push_back({k.size * static_cast<int64_t>(k.tensors.size()), k.unit, {std::move(k)}});
  while (parts.size() > kMaxParts) {
    const auto smallest = std::min_element(parts.begin(), parts.end(),
                                           [](const auto& a, const auto& b) { return a.payload < b.payload; });
    Part small = std::move(*smallest);
    parts.erase(smallest);
    // With its like if there is one, else with the next smallest.
    const auto into = std::min_element(parts.begin(), parts.end(), [&](const auto& a, const auto& b) {
      return std::pair(a.unit != small.unit, a.payload) < std::pair(b.unit != small.unit, b.payload);
    });
    into->payload += small.payload;
    into->kinds.insert(into->kinds.end(), small.kinds.begin(), small.kinds.end());
  }
  const auto copies = [](const Part& p) { return p.kinds.size() == 1 ? p.kinds[0].tensors.size() : 1; };
  while (parts.size() < kMaxParts) {
    const auto largest = std::max_element(parts.begin(), parts.end(), [&](const auto& a, const auto& b) {
      return std::pair(copies(a) > 1, a.payload) < std::pair(copies(b) > 1, b.payload);
    });
    if (largest == parts.end() || copies(*largest) == 1) break;
    Part half = *largest;
    auto &kept = largest->kinds[0].tensors, &moved = half.kinds[0].tensors;
    moved.erase(moved.begin(), moved.begin() + static_cast<std::ptrdiff_t>(kept.size() / 2));
    kept.resize(kept.size() / 2);
    for (Part* p : {&*largest, &half}) p->payload = p->kinds[0].size * static_cast<int64_t>(copies(*p));
    parts.push_back(std::move(half));
  }
  return parts;
}

/// Plans and bounds of subsets of the parts (bit i: part i), each computed once.
class Subsets {
 public:
  Subsets(std::span<const Shape> shapes, std::vector<Part> parts, int64_t dp_size, int64_t block_size)
      : shapes_(shapes), parts_(std::move(parts)), dp_size_(dp_size), block_size_(block_size) {}

  uint32_t all() const { return (uint32_t{1} << parts_.size()) - 1; }
  size_t count() const { return parts_.size(); }

  /// Lower bound of the shard; largest value when it overflows.
  int64_t bound(uint32_t subset) {
    auto& b = bounds_.try_emplace(subset, -1).first->second;
    if (b >= 0) return b;
    std::vector<Kind> chosen;
    for (size_t p = 0; p < parts_.size(); ++p)
      if (subset >> p & 1) chosen.insert(chosen.end(), parts_[p].kinds.begin(), parts_[p].kinds.end());
    return b = detail::ShardSizes(chosen, dp_size_).next(1).value_or(std::numeric_limits<int64_t>::max());
  }

  const BufferSplit::Buffer& plan(uint32_t subset) {
    auto it = plans_.find(subset);
    if (it == plans_.end()) {
      std::vector<Shape> chosen;
      std::vector<int64_t> indices;
      for (size_t t : tensors(subset)) {
        chosen.push_back(shapes_[t]);
        indices.push_back(static_cast<int64_t>(t));
      }
      auto layout = build_row_atomic_layout(chosen, dp_size_, block_size_);
      it = plans_.emplace(subset, BufferSplit::Buffer{std::move(indices), std::move(layout)}).first;
    }
    return it->second;
  }

 private:
  std::vector<size_t> tensors(uint32_t subset) const {
    std::vector<size_t> chosen;
    for (size_t p = 0; p < parts_.size(); ++p)
      if (subset >> p & 1)
        for (const auto& k : parts_[p].kinds) chosen.insert(chosen.end(), k.tensors.begin(), k.tensors.end());
    std::sort(chosen.begin(), chosen.end());
    return chosen;
  }

  std::span<const Shape> shapes_;
  std::vector<Part> parts_;
  int64_t dp_size_, block_size_;
  std::map<uint32_t, int64_t> bounds_;
  std::map<uint32_t, BufferSplit::Buffer> plans_;
};

struct Division {
  int64_t bound = 0;  // sum of the shards' lower bounds
  std::vector<uint32_t> subsets;
};

/// All ways to divide the parts from `next` on into exactly `buffers` non-empty subsets, some of which are begun.
void enumerate(Subsets& s, size_t next, size_t buffers, std::vector<uint32_t>& begun, std::vector<Division>& out) {
  const size_t left = s.count() - next;
  if (begun.size() + left < buffers) return;
  if (left == 0) {
    Division d{0, begun};
    for (uint32_t subset : begun)
      if (__builtin_add_overflow(d.bound, s.bound(subset), &d.bound)) return;
    out.push_back(std::move(d));
    return;
  }
  for (size_t b = 0; b < begun.size(); ++b) {
    begun[b] |= uint32_t{1} << next;
    enumerate(s, next + 1, buffers, begun, out);
    begun[b] &= ~(uint32_t{1} << next);
  }
  if (begun.size() == buffers) return;
  begun.push_back(uint32_t{1} << next);
  enumerate(s, next + 1, buffers, begun, out);
  begun.pop_back();
}

BufferSplit assemble(Subsets& s, const Division& d) {
  BufferSplit split;
  for (uint32_t subset : d.subsets) split.buffers.push_back(s.plan(subset));
  return split;
}

/// The smallest division found into exactly this many buffers; nullopt when none is smaller than `limit` elements.
std::optional<BufferSplit> best_division(Subsets& s, size_t buffers, int64_t dp_size, int64_t limit) {
  std::vector<Division> divisions;
  std::vector<uint32_t> begun;
  enumerate(s, 0, buffers, begun, divisions);
  std::stable_sort(divisions.begin(), divisions.end(), [](const auto& a, const auto& b) { return a.bound < b.bound; });
  std::optional<BufferSplit> best;
  for (size_t i = 0; i < std::min(divisions.size(), kPlanned); ++i) {
    if (divisions[i].bound >= limit / dp_size) break;
    try {
      auto split = assemble(s, divisions[i]);
      if (split.size() >= limit) continue;
      limit = split.size();
      best = std::move(split);
    } catch (const ValueError&) {
      // One of its buffers overflows; another division may not.
    }
  }
  return best;
}

}  // namespace

int64_t BufferSplit::size() const {
  int64_t n = 0;
  for (const auto& b : buffers) n = detail::checked_add(n, b.layout.size, "size");
  return n;
}

int64_t BufferSplit::payload() const {
  int64_t n = 0;
  for (const auto& b : buffers) n = detail::checked_add(n, b.layout.payload(), "payload");
  return n;
}

double BufferSplit::padding_ratio() const {
  const int64_t n = payload();
  return n == 0 ? 0.0 : static_cast<double>(size() - n) / static_cast<double>(n);
}

BufferSplit plan_buffers(std::span<const Shape> shapes, int64_t dp_size, const BufferSplitOptions& options) {
  check_options(options);
  std::vector<int64_t> everything(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) everything[i] = static_cast<int64_t>(i);
  BufferSplit one;
  one.buffers.push_back({everything, build_row_atomic_layout(shapes, dp_size, options.block_size)});
  const double slack = std::max(options.tolerance * static_cast<double>(one.payload()),
                                static_cast<double>(options.min_saving) * static_cast<double>(dp_size));
  if (static_cast<double>(one.size() - one.payload()) <= slack) return one;

  // Tensors without elements follow the first buffer.
  const auto items = detail::items_of(shapes, options.block_size);
  Subsets subsets(shapes, parts_of(items), dp_size, options.block_size);
  std::vector<BufferSplit> found{std::move(one)};
  const auto most = std::min<size_t>(subsets.count(), static_cast<size_t>(options.max_buffers));
  for (size_t buffers = 2; buffers <= most; ++buffers)
    if (auto split = best_division(subsets, buffers, dp_size, found.back().size())) found.push_back(std::move(*split));
  const auto smallest = static_cast<double>(found.back().size());
  auto& chosen = *std::find_if(found.begin(), found.end(),
                               [&](const auto& f) { return static_cast<double>(f.size()) <= smallest + slack; });
  if (chosen.buffers.size() == 1) return std::move(chosen);
  auto& first = chosen.buffers.front();
  bool has_empty = false;
  for (const auto& t : items)
    if (t.size == 0) {
      first.tensors.push_back(static_cast<int64_t>(t.index));
      has_empty = true;
    }
  if (has_empty) {
    std::sort(first.tensors.begin(), first.tensors.end());
    std::vector<Shape> chosen_shapes;
    for (int64_t t : first.tensors) chosen_shapes.push_back(shapes[t]);
    first.layout = build_row_atomic_layout(chosen_shapes, dp_size, options.block_size);
  }
  return std::move(chosen);
}

}  // namespace fsdp
