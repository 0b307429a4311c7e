#include <fsdp/layout.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <numeric>
#include <random>

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Case {
  std::string name;
  std::vector<Shape> shapes;
  int64_t dp_size = 0, size = 0;
};

/// The value after "key": in one line of layouts.json.
std::string value_of(const std::string& line, const std::string& key) {
  const auto at = line.find("\"" + key + "\": ");
  if (at == std::string::npos) throw std::runtime_error("no " + key + " in " + line);
  return line.substr(at + key.size() + 4);
}

std::vector<Shape> parse_shapes(const std::string& text) {
  std::vector<Shape> shapes;
  int depth = 0;
  std::string digits;
  for (char c : text) {
    if (c == '[' && ++depth == 2) shapes.emplace_back();
    if (std::isdigit(static_cast<unsigned char>(c))) digits += c;
    else if (!digits.empty()) shapes.back().push_back(std::stoll(std::exchange(digits, "")));
    if (c == ']' && --depth == 0) return shapes;
  }
  throw std::runtime_error("unbalanced " + text);
}

std::vector<Case> load_cases() {
  std::ifstream in(FSDP_LAYOUTS_JSON);
  std::vector<Case> cases;
  for (std::string line; std::getline(in, line);) {
    if (line.find("\"name\"") == std::string::npos) continue;
    auto name = value_of(line, "name");
    cases.push_back({name.substr(1, name.find('"', 1) - 1), parse_shapes(value_of(line, "shapes")),
                     std::stoll(value_of(line, "dp_size")), std::stoll(value_of(line, "size"))});
  }
  return cases;
}

int64_t row_of(const Shape& s) { return std::accumulate(s.begin() + 1, s.end(), int64_t{1}, std::multiplies<>()); }
int64_t numel_of(const Shape& s) { return s[0] * row_of(s); }

/// The Python planner's size (behaviours LAY-01 to LAY-07), written apart from the library's.
int64_t reference_size(const std::vector<Shape>& shapes, int64_t dp) {
  int64_t chunk = 1;
  for (const auto& s : shapes) chunk = std::lcm(chunk, row_of(s));
  std::vector<Shape> regular, fragments;
  for (const auto& s : shapes) (numel_of(s) < chunk ? fragments : regular).push_back(s);
  std::stable_sort(fragments.begin(), fragments.end(), [](auto& a, auto& b) { return numel_of(a) > numel_of(b); });
  auto up = [](int64_t v, int64_t u) { return (v + u - 1) / u * u; };
  int64_t cursor = 0;
  while (!regular.empty()) {
    const int64_t n = numel_of(regular.front());
    regular.erase(regular.begin());
    int64_t gap = cursor + n;
    cursor = up(gap, chunk);
    if (gap == cursor) continue;
    int64_t gap_end = cursor;
    for (size_t j = 0; j < regular.size(); ++j) {
      const int64_t r = numel_of(regular[j]) % chunk;
      if (r == 0 || r > cursor - gap) continue;
      gap_end = cursor - r;
      cursor += numel_of(regular[j]) - r;
      regular.erase(regular.begin() + static_cast<long>(j));
      break;
    }
    std::vector<Shape> left;
    for (const auto& f : fragments) {
      const int64_t start = up(gap, row_of(f));
      if (start + numel_of(f) <= gap_end) gap = start + numel_of(f);
      else left.push_back(f);
    }
    fragments = left;
  }
  for (const auto& f : fragments) cursor = up(cursor, row_of(f)) + numel_of(f);
  return up(cursor, chunk * dp);
}

/// What must hold of every layout: every element of every tensor in exactly one segment, blocks whole.
void check(const GlobalLayout& l, int64_t block = 1) {
  for (int64_t t = 0; t < l.num_tensors(); ++t) {
    int64_t next = 0;
    std::vector<std::pair<int64_t, GlobalLayout::Rows>> pieces;
    for (int64_t s = 0; s < l.num_segments(); ++s) {
      const auto r = l.rows(t, s);
      if (r.begin == r.end) continue;
      ASSERT_EQ(r.begin, next) << "tensor " << t << " segment " << s;
      if (r.end != l.tensor_shapes[t][0]) {
        ASSERT_EQ(r.end % block, 0) << "tensor " << t << " segment " << s;
      }
      next = r.end;
    }
    if (l.numel(t) > 0) {
      ASSERT_EQ(next, l.tensor_shapes[t][0]) << "tensor " << t;
    }
  }
}

TEST(PaddedLayout, NeverLargerThanThePythonPlanner) {
  const auto cases = load_cases();
  ASSERT_GE(cases.size(), 70u);
  for (const auto& c : cases) {
    const auto l = build_row_atomic_layout(c.shapes, c.dp_size);
    EXPECT_LE(l.size, c.size) << c.name;
    EXPECT_EQ(reference_size(c.shapes, c.dp_size), c.size) << c.name << ": the oracle of this test is wrong";
    EXPECT_TRUE(l.equal_segments()) << c.name;
    EXPECT_LE(l.size, c.dp_size * l.payload()) << c.name;
    check(l);
  }
}

Shape random_shape(std::mt19937_64& g) {
  auto pick = [&](int64_t a, int64_t b) { return std::uniform_int_distribution<int64_t>(a, b)(g); };
  Shape s{pick(0, 9) ? pick(1, 40) : 0};
  for (int64_t d = pick(0, 2); d > 0; --d) s.push_back(pick(1, 12));
  return s;
}

TEST(PaddedLayout, Fuzz) {
  const uint64_t seed = 20261201;
  std::cout << "seed " << seed << "\n";
  std::mt19937_64 g(seed);
  for (int i = 0; i < 100'000; ++i) {
    std::vector<Shape> shapes(1 + g() % 6);
    for (auto& s : shapes) s = random_shape(g);
    const int64_t dp = 1 + static_cast<int64_t>(g() % 9), block = g() % 4 ? 1 : 1 + static_cast<int64_t>(g() % 5);
    const auto padded = build_row_atomic_layout(shapes, dp, block);
    const auto unpadded = build_row_atomic_layout(shapes, dp, block, ShardLayout::kUnpadded);
    SCOPED_TRACE("input " + std::to_string(i));
    check(padded, block);
    check(unpadded, block);
    ASSERT_TRUE(padded.equal_segments());
    ASSERT_EQ(padded, build_row_atomic_layout(shapes, dp, block));
    if (block == 1) {
      ASSERT_LE(padded.size, reference_size(shapes, dp));
    }
    ASSERT_LE(padded.size, dp * padded.payload());
    ASSERT_EQ(unpadded.size, unpadded.payload());
    int64_t largest = 0;
    for (const auto& s : shapes) largest = std::max(largest, std::min(block, s[0]) * row_of(s));
    for (int64_t r = 0; r < dp; ++r) ASSERT_LE(unpadded.rank_size(r), (unpadded.size + dp - 1) / dp + largest);
  }
}

// behaviours LAY-17, faults B33: 102 and 124 elements of awkward rows take 4004 in the Python planner.
TEST(PaddedLayout, AwkwardRowsDoNotBlowUp) {
  const auto l = build_row_atomic_layout(std::vector<Shape>{{4, 7}, {4, 11}, {4, 13}}, 4);
  EXPECT_LE(l.size, 2 * l.payload());
  check(l);
}

TEST(PaddedLayout, ManyRanksAreFast) {
  std::vector<Shape> shapes;
  for (int i = 0; i < 300; ++i) shapes.push_back({4096 + i % 3, 1024 + 128 * (i % 5)});
  const auto l = build_row_atomic_layout(shapes, 100'000);
  EXPECT_LE(l.payload(), l.size);
}

// behaviours LAY-R04: rows of a Linear(8, 16) with bias on two ranks.
TEST(PaddedLayout, RowsOfALinear) {
  const auto l = build_row_atomic_layout(std::vector<Shape>{{16, 8}, {16}}, 2);
  EXPECT_EQ(l.size, 144);
  EXPECT_EQ(l.rows(0, 0), (GlobalLayout::Rows{0, 9}));
  EXPECT_EQ(l.rows(0, 1), (GlobalLayout::Rows{9, 16}));
  EXPECT_EQ(l.rows(1, 0), (GlobalLayout::Rows{}));
  EXPECT_EQ(l.rows(1, 1), (GlobalLayout::Rows{0, 16}));
}

TEST(Layout, RefusesWrongArguments) {  // LAY-10, LAY-11, LAY-12
  const std::vector<Shape> ok{{2, 3}};
  EXPECT_THROW(build_row_atomic_layout(ok, 0), ValueError);
  EXPECT_THROW(build_row_atomic_layout(ok, -2), ValueError);
  EXPECT_THROW(build_row_atomic_layout(ok, 2, 0), ValueError);
  EXPECT_THROW(build_row_atomic_layout(std::vector<Shape>{{}}, 2), ValueError);
  EXPECT_THROW(build_row_atomic_layout(std::vector<Shape>{{4, 0}}, 2), ValueError);
  EXPECT_THROW(build_row_atomic_layout(std::vector<Shape>{{4, -1}}, 2), ValueError);
  EXPECT_EQ(build_row_atomic_layout(std::vector<Shape>{{0, 4}}, 2).size, 0);
  EXPECT_EQ(build_row_atomic_layout(std::vector<Shape>{}, 3).size, 0);
}

TEST(Layout, RefusesOverflow) {  // LAY-16
  const int64_t big = int64_t{1} << 40;
  for (auto kind : {ShardLayout::kPadded, ShardLayout::kUnpadded})
    EXPECT_THROW(build_row_atomic_layout(std::vector<Shape>{{big, big}}, 2, 1, kind), ValueError);
  EXPECT_THROW(build_row_atomic_layout(std::vector<Shape>{{1, big}}, big), ValueError);
}

TEST(Layout, ByHandIsChecked) {  // LAY-13
  const std::vector<Shape> one{{2, 3}}, two{{2, 3}, {2, 3}};
  EXPECT_NO_THROW(GlobalLayout(one, {0}, 12, {0, 6}));
  EXPECT_THROW(GlobalLayout(one, {0}, -1, {0}), ValueError);
  EXPECT_THROW(GlobalLayout(one, {0, 6}, 12, {0, 6}), ValueError);
  EXPECT_THROW(GlobalLayout(one, {-3}, 12, {0, 6}), ValueError);
  EXPECT_THROW(GlobalLayout(one, {9}, 12, {0, 6}), ValueError);
  EXPECT_THROW(GlobalLayout(one, {1}, 12, {0, 6}), ValueError) << "the cut at 6 splits row 1";
  try {
    GlobalLayout(two, {0, 3}, 12, {0, 6});
    FAIL();
  } catch (const ValueError& e) {
    EXPECT_THAT(e.what(), HasSubstr("tensors 0 at [0, 6) and 1 at [3, 9) overlap"));
  }
}

TEST(Layout, EmptyTensorsDoNotOverlap) {  // LAY-15
  check(build_row_atomic_layout(std::vector<Shape>{{0, 6}, {3, 3}, {1, 1}, {3, 3}, {0, 1}}, 3));
}

TEST(TensorAtomicLayout, KeepsTensorsWholeWithTheirOwner) {
  const auto l = build_tensor_atomic_layout(std::vector<Shape>{{2, 3}, {4}, {5, 1}}, std::vector<int64_t>{2, 0, 2}, 4);
  EXPECT_THAT(l.tensor_to_offset, ElementsAre(4, 0, 10));
  EXPECT_THAT(l.rank_to_offset, ElementsAre(0, 4, 4, 15));
  EXPECT_EQ(l.size, 15);
  EXPECT_EQ(l.rows(2, 2), (GlobalLayout::Rows{0, 5}));
  EXPECT_EQ(l.rank_size(1), 0);
  EXPECT_THROW(build_tensor_atomic_layout(std::vector<Shape>{{2}}, std::vector<int64_t>{4}, 4), ValueError);
  EXPECT_THROW(build_tensor_atomic_layout(std::vector<Shape>{{2}}, std::vector<int64_t>{}, 4), ValueError);
}

}  // namespace
}  // namespace fsdp
