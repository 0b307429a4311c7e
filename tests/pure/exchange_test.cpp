/// Every pair of distributions, all members in one process: what each packs is what the others unpack.
#include "layout/exchange_plan.h"

#include <numeric>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "layout/transition_plan.h"

namespace fsdp::detail {
namespace {

struct Held {
  std::string name;
  GlobalLayout layout;
  std::vector<int64_t> axes;
  std::vector<Placement> placements;
  std::vector<int64_t> members;

  Distribution distribution() const { return {&layout, axes, placements, members}; }
  /// This member's elements: each is its number among all elements of all tensors; -1 for padding.
  std::vector<int64_t> local(int64_t member) const {
    const auto index = std::find(members.begin(), members.end(), member) - members.begin();
    std::vector<int64_t> coordinates(axes.size());
    auto rest = index;
    for (size_t a = axes.size(); a-- > 0; rest /= axes[a]) coordinates[a] = rest % axes[a];
    const auto s = local_segments(axes, placements, coordinates);
    std::vector<int64_t> whole(static_cast<size_t>(layout.size), -1);
    int64_t next = 0;
    for (int64_t t = 0; t < layout.num_tensors(); ++t)
      for (int64_t i = 0; i < layout.numel(t); ++i)
        whole[static_cast<size_t>(layout.tensor_to_offset[static_cast<size_t>(t)] + i)] = next++;
    return {whole.begin() + segment_begin(layout, s.first), whole.begin() + segment_begin(layout, s.first + s.count)};
  }
};

std::vector<Held> distributions(const std::vector<Shape>& shapes, int64_t n) {
  const Placement row = RowAtomic{}, whole = Replicate{};
  std::vector<int64_t> owners, order(static_cast<size_t>(n));
  for (size_t i = 0; i < shapes.size(); ++i)
    owners.push_back(static_cast<int64_t>(i * 5 + 1) % std::max<int64_t>(1, n - 1));
  std::iota(order.begin(), order.end(), 0);
  auto reversed = order;
  std::reverse(reversed.begin(), reversed.end());
  const auto padded = build_row_atomic_layout(shapes, n);
  const auto unpadded = build_row_atomic_layout(shapes, n, 1, ShardLayout::kUnpadded);
  std::vector<Held> all{{"padded", padded, {n}, {row}, order},
                        {"unpadded", unpadded, {n}, {row}, order},
                        {"blocks", build_row_atomic_layout(shapes, n, 3), {n}, {row}, order},
                        {"owners", build_tensor_atomic_layout(shapes, owners, n), {n}, {TensorAtomic{}}, order},
                        {"replicated", padded, {n}, {whole}, order},
                        {"reversed", unpadded, {n}, {row}, reversed}};
  if (n % 2 == 0) {
    all.push_back({"hsdp", padded, {2, n / 2}, {whole, row}, order});
    all.push_back({"hfsdp", unpadded, {2, n / 2}, {row, row}, order});
    all.push_back({"hsdp, reversed", padded, {n / 2, 2}, {whole, row}, reversed});
  }
  return all;
}

TEST(Exchange, EveryPairOfDistributions) {
  for (const auto& shapes : std::vector<std::vector<Shape>>{
           {{6, 4}, {1, 5}, {5, 3}, {7}}, {{2, 3}}, {{0, 4}, {9, 2}, {1}, {30}}, {{64, 8}, {3, 100}, {17, 5}, {8, 8}}})
    for (const int64_t n : {1, 2, 3, 4, 5, 8})
      for (const auto& from : distributions(shapes, n))
        for (const auto& to : distributions(shapes, n)) {
          SCOPED_TRACE(from.name + " to " + to.name + " on " + std::to_string(n));
          std::vector<ExchangePlan> plans;
          std::vector<std::vector<int64_t>> packed;
          for (int64_t r = 0; r < n; ++r) {
            plans.push_back(plan_exchange(from.distribution(), to.distribution(), r));
            const auto local = from.local(r);
            auto& out = packed.emplace_back(static_cast<size_t>(plans.back().sent()), -2);
            for (const auto& c : plans.back().sends)
              std::copy_n(local.begin() + c.local, c.elements, out.begin() + c.packed);
          }
          for (int64_t r = 0; r < n; ++r) {
            const auto& plan = plans[static_cast<size_t>(r)];
            std::vector<int64_t> received;
            for (int64_t s = 0; s < n; ++s) {
              const auto& other = plans[static_cast<size_t>(s)];
              const auto count = other.send_counts[static_cast<size_t>(r)];
              ASSERT_EQ(plan.receive_counts[static_cast<size_t>(s)], count);
              const auto begin = std::accumulate(other.send_counts.begin(), other.send_counts.begin() + r, int64_t{0});
              const auto& out = packed[static_cast<size_t>(s)];
              received.insert(received.end(), out.begin() + begin, out.begin() + begin + count);
            }
            const auto expected = to.local(r);
            std::vector<int64_t> local(expected.size(), -1);
            for (const auto& c : plan.receives)
              std::copy_n(received.begin() + c.packed, c.elements, local.begin() + c.local);
            ASSERT_EQ(local, expected);
            // Exact: no element comes twice, and what a member has it takes from itself.
            EXPECT_EQ(static_cast<int64_t>(received.size()),
                      std::count_if(expected.begin(), expected.end(), [](int64_t e) { return e >= 0; }));
            const auto held = from.local(r);
            int64_t lacking = 0;
            for (auto e : expected) lacking += e >= 0 && std::find(held.begin(), held.end(), e) == held.end();
            EXPECT_EQ(plan.received() - plan.receive_counts[static_cast<size_t>(r)], lacking);
          }
        }
}

// Holders of the same rows share the sending.
TEST(Exchange, ReplicasShareTheWork) {
  const std::vector<Shape> shapes{{64, 16}};
  const auto layout = build_row_atomic_layout(shapes, 8);
  std::vector<int64_t> order(8);
  std::iota(order.begin(), order.end(), 0);
  const std::vector<int64_t> axes{4, 2};
  const std::vector<Placement> hsdp{Replicate{}, RowAtomic{}}, whole{Replicate{}, Replicate{}};
  for (int64_t r = 0; r < 8; ++r) {
    const auto plan = plan_exchange({&layout, axes, hsdp, order}, {&layout, axes, whole, order}, r);
    EXPECT_EQ(plan.sent() - plan.send_counts[static_cast<size_t>(r)], 512) << r;
  }
}

}  // namespace
}  // namespace fsdp::detail
