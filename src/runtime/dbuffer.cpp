#include <fsdp/dbuffer.h>

#include <algorithm>
#include <numeric>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "layout/exchange_plan.h"
#include "runtime/transition.h"

namespace fsdp {
namespace {

std::shared_ptr<const GlobalLayout> plan_layout(const DeviceMesh& mesh, const std::vector<Placement>& placements,
                                                const std::vector<Shape>& shapes, ShardLayout kind) {
  int64_t block = 1;
  for (const auto& p : placements) {
    if (const auto* b = std::get_if<BlockAtomic>(&p)) block = b->block_size;
    if (std::holds_alternative<TensorAtomic>(p))
      throw ValueError(
          "TensorAtomic needs an owner per tensor: plan with build_tensor_atomic_layout and pass the layout");
  }
  return std::make_shared<const GlobalLayout>(build_row_atomic_layout(shapes, mesh.size(), block, kind));
}

const DeviceMesh& checked(const DeviceMesh& mesh, const std::vector<Placement>& placements,
                          const GlobalLayout* layout = nullptr) {
  detail::check_buffer_placements(mesh, placements);
  if (layout && layout->num_segments() != mesh.size())
    throw ValueError(fmt::format("expected a layout of one segment per rank of the mesh ({}), got {} segments",
                                 mesh.size(), layout->num_segments()));
  return mesh;
}

template <class T>
void expect_equal(const char* field, const T& expected, const T& got) {
  if (!(expected == got))
    throw ValueError(fmt::format("the destination's {} differs: expected {}, got {}", field, expected, got));
}

std::string text(const DeviceMesh& mesh) {
  std::string s;
  for (int64_t i = 0; i < mesh.ndim(); ++i)
    s += fmt::format("{}{}={}", i ? ", " : "", mesh.axis_names()[i], mesh.shape()[i]);
  return "mesh(" + s + ")";
}

void expect_compatible(const DBuffer& source, const DBuffer& out, bool same_dtype, bool same_placements) {
  if (!(source.mesh() == out.mesh())) expect_equal("mesh", text(source.mesh()), text(out.mesh()) + " (another mesh)");
  if (!(source.layout() == out.layout()))
    throw ValueError(fmt::format("the destination's layout differs: expected {} tensors in {} elements, got {} in {}",
                                 source.layout().num_tensors(), source.layout().size, out.layout().num_tensors(),
                                 out.layout().size));
  if (same_placements && source.placements() != out.placements())
    expect_equal("placements", to_string(std::span(source.placements())), to_string(std::span(out.placements())));
  if (same_dtype) expect_equal<std::string>("dtype", c10::toString(source.dtype()), c10::toString(out.dtype()));
  expect_equal("device", source.local_buffer().device().str(), out.local_buffer().device().str());
}

void expect_same_tensors(const GlobalLayout& a, const GlobalLayout& b) {
  if (a.num_tensors() != b.num_tensors())
    throw ValueError(
        fmt::format("redistribute: expected a layout of {} tensors, got one of {}", a.num_tensors(), b.num_tensors()));
  for (size_t i = 0; i < a.tensor_shapes.size(); ++i)
    if (a.tensor_shapes[i] != b.tensor_shapes[i])
      throw ValueError(fmt::format("redistribute: tensor {} has shape [{}] here and [{}] in the layout given", i,
                                   fmt::join(a.tensor_shapes[i], ", "), fmt::join(b.tensor_shapes[i], ", ")));
}

void refuse_partial(const std::vector<Placement>& placements) {
  if (std::any_of(placements.begin(), placements.end(), is_partial))
    throw ValueError(fmt::format("redistribute: partial sums ({}) do not travel to another layout; reduce them first",
                                 to_string(std::span(placements))));
}

}  // namespace

DBuffer::DBuffer(Wrapped, at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                 std::shared_ptr<const GlobalLayout> layout, ElementRange range)
    : mesh_(std::move(mesh)),
      placements_(std::move(placements)),
      layout_(std::move(layout)),
      range_(range),
      local_(std::move(local)) {}

DBuffer::DBuffer(DeviceMesh mesh, std::vector<Placement> placements, std::vector<Shape> shapes, at::ScalarType dtype,
                 ShardLayout layout)
    : DBuffer(mesh, placements, plan_layout(checked(mesh, placements), placements, shapes, layout), dtype) {}

DBuffer::DBuffer(DeviceMesh mesh, std::vector<Placement> placements, std::shared_ptr<const GlobalLayout> layout,
                 at::ScalarType dtype)
    : mesh_(checked(mesh, placements, layout.get())),
      placements_(std::move(placements)),
      layout_(std::move(layout)),
      range_(detail::local_range(mesh_, placements_, *layout_)),
      local_(at::zeros({range_.size()}, at::TensorOptions().dtype(dtype).device(mesh_.device()))) {}

DBuffer DBuffer::wrap(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                      std::shared_ptr<const GlobalLayout> layout) {
  checked(mesh, placements, layout.get());
  auto range = detail::local_range(mesh, placements, *layout);
  if (local.dim() != 1 || !local.is_contiguous() || local.numel() != range.size())
    throw ValueError(
        fmt::format("expected a flat contiguous tensor of {} elements to wrap, got {} dimensions, {} elements, {}",
                    range.size(), local.dim(), local.numel(), local.is_contiguous() ? "contiguous" : "not contiguous"));
  if (local.device() != mesh.device())
    throw ValueError(fmt::format("expected a tensor on the mesh's device {} to wrap, got {}", mesh.device().str(),
                                 local.device().str()));
  return DBuffer(Wrapped{}, std::move(local), std::move(mesh), std::move(placements), std::move(layout), range);
}

DBuffer DBuffer::distribute_tensors(at::TensorList full, DeviceMesh mesh, std::vector<Placement> placements,
                                    ShardLayout layout) {
  if (full.empty()) throw ValueError("distribute_tensors expects at least one tensor");
  c10::NoGradGuard no_grad;
  std::vector<Shape> shapes;
  for (size_t i = 0; i < full.size(); ++i) {
    if (full[i].scalar_type() != full[0].scalar_type())
      throw ValueError(fmt::format("tensors of one buffer share a dtype: tensor 0 has {}, tensor {} has {}",
                                   c10::toString(full[0].scalar_type()), i, c10::toString(full[i].scalar_type())));
    shapes.push_back(full[i].sizes().vec());
  }
  DBuffer buffer(std::move(mesh), std::move(placements), std::move(shapes), full[0].scalar_type(), layout);
  for (size_t i = 0; i < full.size(); ++i) {
    auto rows = buffer.local_rows(static_cast<int64_t>(i));
    if (full[i].is_meta() || rows.begin == rows.end) continue;
    buffer.local_tensor(static_cast<int64_t>(i)).copy_(full[i].narrow(0, rows.begin, rows.end - rows.begin));
  }
  return buffer;
}

GlobalLayout::Rows DBuffer::local_rows(int64_t index) const {
  return layout_->rows_in(index, range_.begin, range_.end);
}

at::Tensor DBuffer::local_tensor(int64_t index) const {
  if (index < 0 || index >= layout_->num_tensors())
    throw ValueError(
        fmt::format("tensor index {} is out of range: the buffer has {} tensors", index, layout_->num_tensors()));
  auto sizes = layout_->tensor_shapes[index];
  auto rows = local_rows(index);
  sizes[0] = rows.end - rows.begin;
  int64_t n = sizes[0] * layout_->row_size(index);
  int64_t offset = n == 0 ? 0 : layout_->tensor_to_offset[index] + rows.begin * layout_->row_size(index) - range_.begin;
  return local_.narrow(0, offset, n).view(sizes);
}

DBuffer DBuffer::redistribute(std::vector<Placement> placements) const {
  checked(mesh_, placements);
  detail::TransitionPlan plan(mesh_, placements_, placements);
  auto range = detail::local_range(mesh_, placements, *layout_);
  c10::NoGradGuard no_grad;
  detail::TransitionRun run({.mesh = mesh_, .plan = &plan, .layout = layout_, .source = local_, .range = range_});
  run.start();
  run.finish();
  return DBuffer(Wrapped{}, run.result(), mesh_, std::move(placements), layout_, range);
}

DBuffer DBuffer::redistribute(DeviceMesh mesh, std::vector<Placement> placements,
                              std::shared_ptr<const GlobalLayout> layout) const {
  if (!layout) throw ValueError("redistribute: the layout is null");
  const auto members = mesh_.world_ranks(), others = mesh.world_ranks();
  expect_same_tensors(*layout_, *layout);
  expect_equal("device", local_.device().str(), mesh.device().str());
  if (&mesh.world() != &mesh_.world() ||
      !std::is_permutation(members.begin(), members.end(), others.begin(), others.end()))
    throw ValueError(fmt::format("redistribute: expected a mesh of ranks {}, as this buffer's, got ranks {}",
                                 fmt::join(members, ", "), fmt::join(others, ", ")));
  DBuffer result(std::move(mesh), std::move(placements), std::move(layout), dtype());
  refuse_partial(placements_);
  refuse_partial(result.placements_);
  // The exchange numbers the ranks as this mesh does.
  std::vector<int64_t> own(members.size()), theirs;
  std::iota(own.begin(), own.end(), 0);
  for (auto rank : others) theirs.push_back(std::find(members.begin(), members.end(), rank) - members.begin());
  const auto plan =
      detail::plan_exchange({layout_.get(), mesh_.shape(), placements_, own},
                            {result.layout_.get(), result.mesh_.shape(), result.placements_, theirs}, mesh_.rank());
  c10::NoGradGuard no_grad;
  auto sent = at::empty({plan.sent()}, local_.options()), received = at::empty({plan.received()}, local_.options());
  for (const auto& c : plan.sends) sent.narrow(0, c.packed, c.elements).copy_(local_.narrow(0, c.local, c.elements));
  mesh_.communicator_all().all_to_all(received, sent, plan.receive_counts, plan.send_counts).wait();
  for (const auto& c : plan.receives)
    result.local_.narrow(0, c.local, c.elements).copy_(received.narrow(0, c.packed, c.elements));
  return result;
}

void DBuffer::redistribute_into(DBuffer& out) const {
  expect_compatible(*this, out, true, false);
  detail::TransitionPlan plan(mesh_, placements_, out.placements_);
  c10::NoGradGuard no_grad;
  detail::TransitionRun run({.mesh = mesh_,
                             .plan = &plan,
                             .layout = layout_,
                             .source = local_,
                             .range = range_,
                             .destination = out.local_,
                             .destination_range = out.range_});
  run.start();
  run.finish();
}

DBuffer DBuffer::cast(at::ScalarType dtype) const {
  if (dtype == this->dtype()) return *this;
  c10::NoGradGuard no_grad;
  return DBuffer(Wrapped{}, local_.to(dtype), mesh_, placements_, layout_, range_);
}

void DBuffer::cast_into(DBuffer& out) const {
  expect_compatible(*this, out, false, true);
  c10::NoGradGuard no_grad;
  out.local_.copy_(local_);
}

int64_t DBuffer::local_bytes() const { return static_cast<int64_t>(local_.storage().nbytes()); }

void DBuffer::release_storage() {
  auto* storage = local_.storage().unsafeGetStorageImpl();
  if (storage->nbytes() == 0) return;
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  storage->set_nbytes(0);
}

void DBuffer::reallocate_storage() {
  auto* storage = local_.storage().unsafeGetStorageImpl();
  const size_t bytes = static_cast<size_t>(local_.storage_offset() + local_.numel()) * local_.element_size();
  if (storage->nbytes() != 0 || bytes == 0) return;
  storage->set_data_ptr_noswap(c10::GetAllocator(storage->device_type())->allocate(bytes));
  storage->set_nbytes(bytes);
}

}  // namespace fsdp
