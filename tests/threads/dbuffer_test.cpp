/// DBuffer: layouts, ranges, casts, storage, and what redistribution moves and refuses.
#include <map>

#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

const Placement kR = Replicate{}, kS = RowAtomic{};

std::vector<torch::Tensor> mix() {
  return {torch::arange(21, torch::kFloat).view({7, 3}), torch::arange(10, torch::kFloat).view({2, 5}) + 100,
          torch::arange(7, torch::kFloat) + 200};
}

std::vector<torch::Tensor> scaled_pair(double by) { return {torch::full({5, 3}, by), torch::full({4}, 10 * by)}; }

void expect_values(const DBuffer& buffer, const std::vector<torch::Tensor>& full, const std::string& what) {
  for (size_t i = 0; i < full.size(); ++i) {
    const auto k = static_cast<int64_t>(i);
    const auto rows = buffer.local_rows(k);
    const auto local = buffer.local_tensor(k);
    EXPECT_TRUE(local.is_contiguous()) << what;
    EXPECT_EQ(local.dim(), full[i].dim()) << what;
    EXPECT_TRUE(torch::equal(local, full[i].slice(0, rows.begin, rows.end))) << what << " tensor " << i;
  }
}

TEST(DBufferTest, RangesAndCasts) {  // DBF-01 to DBF-05, DBF-08, DBF-11, DBF-37
  for (int64_t ranks : {1, 2, 3, 4})
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      auto whole = DBuffer::distribute_tensors(mix(), mesh, {kR});
      auto part = DBuffer::distribute_tensors(mix(), mesh, {kS});
      EXPECT_EQ(whole.layout(), part.layout());
      EXPECT_EQ(whole.range(), (ElementRange{0, whole.layout().size}));
      const auto shard = part.layout().size / ranks;
      EXPECT_EQ(part.range(), (ElementRange{mesh.rank() * shard, (mesh.rank() + 1) * shard}));
      expect_values(whole, mix(), "replicated");
      expect_values(part, mix(), "sharded");
      EXPECT_EQ(part.local_buffer().device(), mesh.device());
      CollectiveLog log(mesh.world());
      auto gathered = part.redistribute({kR});
      expect_values(gathered, mix(), "gathered");
      EXPECT_EQ(log.records().size(), ranks == 1 ? 0u : 1u);

      EXPECT_TRUE(part.cast(torch::kFloat).local_buffer().is_same(part.local_buffer()));
      auto low = part.cast(torch::kBFloat16);
      EXPECT_EQ(low.dtype(), torch::kBFloat16);
      EXPECT_EQ(low.placements(), part.placements());
      EXPECT_TRUE(torch::equal(low.local_buffer(), part.local_buffer().to(torch::kBFloat16)));
      DBuffer into(mesh, {kS}, part.shared_layout(), torch::kBFloat16);
      const auto* address = into.local_buffer().data_ptr();
      part.cast_into(into);
      EXPECT_EQ(into.local_buffer().data_ptr(), address);
      EXPECT_TRUE(torch::equal(into.local_buffer(), low.local_buffer()));
      DBuffer same(mesh, {kS}, part.shared_layout(), torch::kFloat);
      part.cast_into(same);
      EXPECT_TRUE(torch::equal(same.local_buffer(), part.local_buffer()));
    });
}

TEST(DBufferTest, StorageIsEmptiedAndRefilledInPlace) {  // DBF-06
  on_mesh({1}, [](const DeviceMesh& mesh) {
    DBuffer buffer(mesh, {kR}, std::vector<Shape>{{4, 4}}, torch::kFloat);
    auto view = buffer.local_tensor(0);
    const auto* storage = view.storage().unsafeGetStorageImpl();
    buffer.release_storage();
    buffer.release_storage();
    EXPECT_EQ(buffer.local_bytes(), 0);
    EXPECT_EQ(view.sizes(), (std::vector<int64_t>{4, 4}));
    buffer.reallocate_storage();
    buffer.reallocate_storage();
    EXPECT_EQ(buffer.local_bytes(), 64);
    EXPECT_EQ(buffer.local_buffer().storage().unsafeGetStorageImpl(), storage);
    buffer.local_buffer().fill_(7);
    EXPECT_EQ(off_by(view, 7), 0);
  });
}

TEST(DBufferTest, WrapsMemoryWithoutCopying) {  // DBF-07, DBF-32
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto whole = DBuffer::distribute_tensors(mix(), mesh, {kR});
    const auto shard = whole.layout().size / 2;
    auto slice = whole.local_buffer().narrow(0, mesh.rank() * shard, shard);
    auto part = DBuffer::wrap(slice, mesh, {kS}, whole.shared_layout());
    EXPECT_EQ(part.local_buffer().data_ptr(), slice.data_ptr());
    expect_values(part.redistribute({kR}), mix(), "gathered");
    auto wrap = [&](torch::Tensor t) { DBuffer::wrap(t, mesh, {kS}, whole.shared_layout()); };
    EXPECT_THAT(thrown<ValueError>([&] { wrap(slice.view({1, -1})); }), HasSubstr("2 dimensions"));
    EXPECT_THAT(thrown<ValueError>([&] { wrap(torch::ones({2 * shard}).slice(0, 0, 2 * shard, 2)); }),
                HasSubstr("not contiguous"));
    EXPECT_THAT(thrown<ValueError>([&] { wrap(torch::ones({shard + 1})); }), HasSubstr(std::to_string(shard)));
    EXPECT_THAT(thrown<ValueError>([&] { wrap(torch::empty({shard}, torch::kMeta)); }), HasSubstr("meta"));
  });
}

TEST(DBufferTest, TakesTensorsOfAnyStrideAndMeta) {  // DBF-10, DBF-35
  on_mesh({3}, [](const DeviceMesh& mesh) {
    auto transposed = torch::arange(12, torch::kFloat).view({3, 4}).t().requires_grad_();
    auto buffer = DBuffer::distribute_tensors(std::vector<torch::Tensor>{transposed}, mesh, {kS});
    EXPECT_FALSE(buffer.local_buffer().requires_grad());
    expect_values(buffer, {transposed.detach().contiguous()}, "transposed");
    auto half = DBuffer::distribute_tensors(
        std::vector<torch::Tensor>{torch::empty({4, 4}, torch::kMeta), torch::full({4}, 7.0)}, mesh, {kR});
    EXPECT_TRUE(half.local_buffer().device().is_cpu());
    EXPECT_EQ(off_by(half.local_tensor(1), 7), 0);
    EXPECT_THAT(thrown<ValueError>([&] {
                  DBuffer::distribute_tensors(
                      std::vector<torch::Tensor>{torch::ones({2}), torch::ones({2}, torch::kLong)}, mesh, {kR});
                }),
                HasSubstr("dtype"));
  });
}

TEST(DBufferTest, SlicesShareMemoryAndNothingElseMovesIt) {  // DBF-13, DBF-26
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto whole = DBuffer::distribute_tensors(mix(), mesh, {kR});
    CollectiveLog log(mesh.world());
    auto slice = whole.redistribute({kS});
    auto average = whole.redistribute({Partial{}});
    auto same = whole.redistribute({kR});
    EXPECT_TRUE(log.records().empty());
    EXPECT_TRUE(slice.local_buffer().is_alias_of(whole.local_buffer()));
    EXPECT_TRUE(average.local_buffer().is_alias_of(whole.local_buffer()));
    EXPECT_TRUE(same.local_buffer().is_alias_of(whole.local_buffer()));
    DBuffer out(mesh, {kS}, whole.shared_layout(), torch::kFloat);
    whole.redistribute_into(out);
    EXPECT_FALSE(out.local_buffer().is_alias_of(whole.local_buffer()));
    EXPECT_TRUE(torch::equal(out.local_buffer(), slice.local_buffer()));
    expect_values(out.redistribute({kR}), mix(), "gathered");
  });
}

TEST(DBufferTest, Reductions) {  // DBF-14 to DBF-17, DBF-23
  for (int64_t ranks : {1, 2, 3, 4})
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      const double w = static_cast<double>(ranks), r = static_cast<double>(mesh.rank()) + 1;
      for (auto op : {ReduceOp::kSum, ReduceOp::kAvg}) {
        const double expected = op == ReduceOp::kSum ? w * (w + 1) / 2 : (w + 1) / 2;
        auto partial = DBuffer::distribute_tensors(scaled_pair(r), mesh, {Partial{op}});
        auto reduced = partial.redistribute({kR});
        auto scattered = partial.redistribute({kS});
        DBuffer into(mesh, {kS}, partial.shared_layout(), torch::kFloat);
        partial.redistribute_into(into);
        expect_values(reduced, scaled_pair(expected), "all-reduced");
        expect_values(scattered, scaled_pair(expected), "reduce-scattered");
        expect_values(into.redistribute({kR}), scaled_pair(expected), "into");
        expect_values(partial, scaled_pair(r), "the source");
      }
    });
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const double o = static_cast<double>(mesh.local_rank("outer")) + 1;
    auto source = DBuffer::distribute_tensors(scaled_pair(o), mesh, {Partial{ReduceOp::kSum}, kR})
                      .redistribute({Partial{ReduceOp::kSum}, kS});
    auto out = source.redistribute({kS, kS});
    EXPECT_EQ(out.range().size(), source.range().size() / 2);
    const auto inner = source.layout().size / 2, both = inner / 2;
    EXPECT_EQ(out.range().begin, mesh.local_rank("inner") * inner + mesh.local_rank("outer") * both);
    expect_values(out.redistribute({kR, kR}), scaled_pair(3), "both axes");
  });
}

TEST(DBufferTest, SeveralAxes) {  // DBF-20, DBF-22, DBF-24, DBF-25; LAY-32, LAY-36
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    auto inner = DBuffer::distribute_tensors(mix(), mesh, {kR, kS});
    const auto size = inner.layout().size;
    EXPECT_EQ(inner.range(),
              (ElementRange{mesh.local_rank("inner") * size / 2, (mesh.local_rank("inner") + 1) * size / 2}));
    CollectiveLog log(mesh.world());
    expect_values(inner.redistribute({kR, kR}), mix(), "inner");
    auto both = inner.redistribute({kS, kS});
    EXPECT_EQ(both.range().begin, mesh.local_rank("inner") * size / 2 + mesh.local_rank("outer") * size / 4);
    expect_values(both.redistribute({kR, kR}), mix(), "both");
    std::vector<std::string> axes;
    for (const auto& r : log.records()) axes.push_back(r.axes + " " + r.operation);
    EXPECT_THAT(axes, ::testing::ElementsAre("inner all_gather", "outer all_gather", "inner all_gather"));
  });
}

// behaviours DBF-26, DBF-36, DBF-37: placements of a buffer and the way between them.
TEST(DBufferTest, Redistribute) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto tensors = mix();
    const Placement r = kR, s = kS;
    for (auto kind : {ShardLayout::kPadded, ShardLayout::kUnpadded})
      for (const auto& from : std::vector<std::vector<Placement>>{{r, r}, {r, s}, {s, s}})
        for (const auto& to : std::vector<std::vector<Placement>>{{r, r}, {r, s}, {s, s}}) {
          auto buffer = DBuffer::distribute_tensors(tensors, mesh, from, kind);
          auto out = buffer.redistribute(to);
          EXPECT_EQ(out.placements(), to);
          for (int64_t i = 0; i < 3; ++i) {
            const auto rows = out.local_rows(i);
            EXPECT_TRUE(
                torch::equal(out.local_tensor(i), tensors[static_cast<size_t>(i)].slice(0, rows.begin, rows.end)));
          }
        }
    const double mine = static_cast<double>(mesh.rank() + 1);
    for (auto op : {ReduceOp::kSum, ReduceOp::kAvg})
      for (const auto& to : std::vector<std::vector<Placement>>{{r, r}, {r, s}, {s, s}}) {
        auto partial = DBuffer::distribute_tensors(std::vector<torch::Tensor>{torch::full({5, 3}, mine)}, mesh,
                                                   {Partial{op}, Partial{op}});
        auto out = partial.redistribute(to);
        EXPECT_LT(off_by(out.local_tensor(0), op == ReduceOp::kSum ? 10.0 : 2.5), 1e-6);
        EXPECT_EQ(off_by(partial.local_tensor(0), mine), 0.0) << "the source changed";
      }
    auto sharded = DBuffer::distribute_tensors(tensors, mesh, {r, s});
    thrown<ValueError>([&] { sharded.redistribute({s, r}); });
    thrown<ValueError>([&] { sharded.redistribute({r}); });
    thrown<ValueError>([&] { sharded.redistribute({r, Partial{}}); });
    thrown<ValueError>([&] { sharded.redistribute({r, Shard{0}}); });
    thrown<ValueError>([&] { DBuffer(mesh, {Partial{ReduceOp::kMax}, r}, {{2, 2}}, torch::kFloat); });
    auto other = DBuffer(mesh, {r, r}, std::vector<Shape>{{2, 2}}, torch::kFloat);
    EXPECT_THAT(thrown<ValueError>([&] { sharded.redistribute_into(other); }), HasSubstr("layout"));
    // The same Storage object, emptied and filled again.
    auto view = other.local_tensor(0);
    const auto* storage = other.local_buffer().storage().unsafeGetStorageImpl();
    other.release_storage();
    EXPECT_EQ(other.local_bytes(), 0);
    other.reallocate_storage();
    EXPECT_EQ(other.local_buffer().storage().unsafeGetStorageImpl(), storage);
    other.local_buffer().fill_(7);
    EXPECT_EQ(off_by(view, 7), 0.0);
  });
}

// From any layout, mesh and placements to any other, in one collective.
TEST(DBufferTest, RedistributesBetweenLayoutsAndMeshes) {
  for (const int64_t ranks : {2, 4, 8})
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      auto grid = init_device_mesh(mesh.world().shared_from_this(), {2, ranks / 2}, {"outer", "inner"});
      std::vector<Shape> shapes;
      for (const auto& t : mix()) shapes.push_back(t.sizes().vec());
      const std::vector<int64_t> owners{0, ranks - 1, 0};
      auto shared = [](GlobalLayout layout) { return std::make_shared<const GlobalLayout>(std::move(layout)); };
      const auto padded = shared(build_row_atomic_layout(shapes, ranks));
      const auto unpadded = shared(build_row_atomic_layout(shapes, ranks, 1, ShardLayout::kUnpadded));
      const auto owned = shared(build_tensor_atomic_layout(shapes, owners, ranks));
      struct Side {
        std::string name;
        DeviceMesh mesh;
        std::vector<Placement> placements;
        std::shared_ptr<const GlobalLayout> layout;
      };
      const std::vector<Side> sides{
          {"padded", mesh, {kS}, padded}, {"unpadded", mesh, {kS}, unpadded}, {"owners", mesh, {TensorAtomic{}}, owned},
          {"whole", mesh, {kR}, padded},  {"hsdp", grid, {kR, kS}, unpadded}, {"hfsdp", grid, {kS, kS}, padded}};
      for (const auto& from : sides) {
        DBuffer source(from.mesh, from.placements, from.layout, torch::kDouble);
        for (int64_t i = 0; i < 3; ++i) {
          const auto rows = source.local_rows(i);
          source.local_tensor(i).copy_(mix()[static_cast<size_t>(i)].slice(0, rows.begin, rows.end));
        }
        const auto before = source.local_buffer().clone();
        for (const auto& to : sides) {
          CollectiveLog log(mesh.world());
          const auto result = source.redistribute(to.mesh, to.placements, to.layout);
          std::vector<torch::Tensor> doubles;
          for (const auto& t : mix()) doubles.push_back(t.to(torch::kDouble));
          expect_values(result, doubles, from.name + " to " + to.name);
          EXPECT_EQ(result.placements(), to.placements);
          ASSERT_EQ(log.records().size(), 1u);
          EXPECT_EQ(log.records()[0].operation, "all_to_all");
          EXPECT_TRUE(torch::equal(source.local_buffer(), before));
        }
      }
      DBuffer source(mesh, {kS}, padded, torch::kFloat);
      EXPECT_THAT(thrown<ValueError>([&] { source.redistribute(mesh, {Partial{}}, padded); }), HasSubstr("partial"));
      EXPECT_THAT(thrown<ValueError>([&] { source.redistribute(mesh, {kS}, nullptr); }), HasSubstr("null"));
      const auto fewer = shared(build_row_atomic_layout(std::vector<Shape>{{7, 3}}, ranks));
      EXPECT_THAT(thrown<ValueError>([&] { source.redistribute(mesh, {kS}, fewer); }),
                  HasSubstr("3 tensors, got one of 1"));
      auto other_shapes = shapes;
      other_shapes[1] = {5, 2};
      const auto other = shared(build_row_atomic_layout(other_shapes, ranks));
      EXPECT_THAT(thrown<ValueError>([&] { source.redistribute(mesh, {kS}, other); }),
                  HasSubstr("tensor 1 has shape [2, 5] here and [5, 2]"));
      const std::vector<MeshAxis> inner{"inner"};
      const auto small = shared(build_row_atomic_layout(shapes, ranks / 2));
      EXPECT_THAT(thrown<ValueError>([&] { source.redistribute(grid.sub(inner), {kS}, small); }),
                  HasSubstr("expected a mesh of ranks"));
    });
}

TEST(DBufferTest, Refusals) {  // DBF-21, DBF-29 to DBF-31, DBF-34, DBF-36
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const std::vector<Shape> shapes{{4, 4}};
    auto make = [&](std::vector<Placement> p) { return DBuffer(mesh, std::move(p), shapes, torch::kFloat); };
    EXPECT_THAT(thrown<ValueError>([&] { make({kS, kR}); }), HasSubstr("innermost"));
    EXPECT_THAT(thrown<ValueError>([&] { make({kR}); }), HasSubstr("(2), got 1"));
    EXPECT_THAT(thrown<ValueError>([&] { make({kR, Shard{0}}); }), HasSubstr("fully_shard"));
    EXPECT_THAT(thrown<ValueError>([&] { make({kR, Partial{ReduceOp::kMax}}); }), HasSubstr("inner"));
    EXPECT_THAT(thrown<ValueError>([&] { make({kS, BlockAtomic{2}}); }), HasSubstr("mix"));
    EXPECT_THAT(thrown<ValueError>([&] { make({kR, TensorAtomic{}}); }), HasSubstr("owner"));
    auto sharded = make({kR, kS});
    EXPECT_THAT(thrown<ValueError>([&] { sharded.redistribute({kR, Partial{}}); }), HasSubstr("'inner'"));
    EXPECT_THAT(thrown<ValueError>([&] { sharded.redistribute({Partial{ReduceOp::kSum}, kS}); }), HasSubstr("'outer'"));
    EXPECT_THAT(thrown<ValueError>([&] { sharded.redistribute({kR}); }), HasSubstr("(2), got 1"));
    EXPECT_THAT(thrown<ValueError>([&] { sharded.local_tensor(1); }), HasSubstr("out of range"));

    auto into = [&](DBuffer out) { return thrown<ValueError>([&] { sharded.redistribute_into(out); }); };
    EXPECT_THAT(into(DBuffer(mesh, {kR, kR}, {{4, 2}}, torch::kFloat)), HasSubstr("layout"));
    EXPECT_THAT(into(DBuffer(mesh, {kR, kR}, shapes, torch::kDouble)), HasSubstr("dtype"));
    auto other = init_device_mesh(mesh.world().shared_from_this(), {2, 2}, {"outer", "inner"});
    EXPECT_THAT(into(DBuffer(other, {kR, kR}, shapes, torch::kFloat)), HasSubstr("mesh"));
    auto cast = make({kR, kR});
    EXPECT_THAT(thrown<ValueError>([&] { sharded.cast_into(cast); }), HasSubstr("placements"));
  });
}

}  // namespace
}  // namespace fsdp::testing
