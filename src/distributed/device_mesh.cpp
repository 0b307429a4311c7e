#include <fsdp/distributed/device_mesh.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace fsdp {

/// What a mesh and its sub-meshes share: the whole grid, and the communicators made so far.
struct MeshGrid {
  std::shared_ptr<World> world;
  int64_t id;
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  std::vector<int64_t> coordinates;  // of this rank
  std::map<std::string, std::shared_ptr<Communicator>> communicators;

  /// World ranks that share this rank's coordinates on all axes but these, row-major in the order of `axes`.
  std::vector<int64_t> ranks_along(const std::vector<int64_t>& axes) const {
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    int64_t base = 0;
    for (size_t i = 0; i < shape.size(); ++i)
      if (std::find(axes.begin(), axes.end(), static_cast<int64_t>(i)) == axes.end())
        base += coordinates[i] * strides[i];
    std::vector<int64_t> ranks{base};
    for (auto axis : axes) {
      std::vector<int64_t> next;
      for (auto r : ranks)
        for (int64_t c = 0; c < shape[axis]; ++c) next.push_back(r + c * strides[axis]);
      ranks = std::move(next);
    }
    return ranks;
  }

  Communicator& communicator(const std::vector<int64_t>& axes, Channel channel) {
    std::string label;
    for (auto axis : axes) label += (label.empty() ? "" : ",") + names[axis];
    const auto ranks = ranks_along(axes);
    // Equal on the members, and different for each channel, group of ranks and mesh.
    const auto key = fmt::format("{}/{}/{}/{}", id, static_cast<int>(channel), label, fmt::join(ranks, "-"));
    auto& comm = communicators[key];
    if (!comm) {
      comm = world->communicator(ranks, key, label);
      if (channel == Channel::kControl) comm->set_control();
    }
    return *comm;
  }
};

struct DeviceMesh::Impl {
  std::shared_ptr<MeshGrid> grid;
  std::vector<int64_t> axes;  // of the grid, outer to inner
  std::vector<int64_t> shape;
  std::vector<std::string> names;
};

DeviceMesh::DeviceMesh(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

int64_t DeviceMesh::ndim() const { return static_cast<int64_t>(impl_->axes.size()); }

int64_t DeviceMesh::size() const {
  return std::accumulate(impl_->shape.begin(), impl_->shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t DeviceMesh::axis_index(const MeshAxis& axis) const {
  if (const auto* name = std::get_if<std::string>(&axis)) {
    const auto it = std::find(impl_->names.begin(), impl_->names.end(), *name);
    if (it == impl_->names.end())
      throw ValueError(fmt::format("the mesh has no axis '{}'; its axes are {}", *name, fmt::join(impl_->names, ", ")));
    return it - impl_->names.begin();
  }
  const auto given = std::get<int64_t>(axis);
  const auto index = given < 0 ? given + ndim() : given;
  if (index < 0 || index >= ndim())
    throw ValueError(fmt::format("mesh axis {} is out of range: the mesh has {} axes ({})", given, ndim(),
                                 fmt::join(impl_->names, ", ")));
  return index;
}

int64_t DeviceMesh::size(const MeshAxis& axis) const { return impl_->shape[axis_index(axis)]; }

int64_t DeviceMesh::local_rank(const MeshAxis& axis) const {
  return impl_->grid->coordinates[impl_->axes[axis_index(axis)]];
}

int64_t DeviceMesh::rank() const {
  int64_t r = 0;
  for (int64_t i = 0; i < ndim(); ++i) r = r * impl_->shape[i] + local_rank(i);
  return r;
}

const std::vector<std::string>& DeviceMesh::axis_names() const { return impl_->names; }
const std::vector<int64_t>& DeviceMesh::shape() const { return impl_->shape; }
c10::Device DeviceMesh::device() const { return impl_->grid->world->device(); }
World& DeviceMesh::world() const { return *impl_->grid->world; }
std::vector<int64_t> DeviceMesh::world_ranks() const { return impl_->grid->ranks_along(impl_->axes); }

Communicator& DeviceMesh::communicator(const MeshAxis& axis, Channel channel) const {
  return impl_->grid->communicator({impl_->axes[axis_index(axis)]}, channel);
}

Communicator& DeviceMesh::communicator_all(Channel channel) const {
  return impl_->grid->communicator(impl_->axes, channel);
}

DeviceMesh DeviceMesh::sub(std::span<const MeshAxis> axes) const {
  auto impl = std::make_shared<Impl>();
  impl->grid = impl_->grid;
  int64_t last = -1;
  for (const auto& axis : axes) {
    const auto i = axis_index(axis);
    if (i == last) throw ValueError(fmt::format("mesh axis '{}' is named twice", impl_->names[i]));
    if (i < last)
      throw ValueError(fmt::format("mesh axis '{}' comes after '{}': list axes in the mesh's order ({})",
                                   impl_->names[i], impl_->names[last], fmt::join(impl_->names, ", ")));
    last = i;
    impl->axes.push_back(impl_->axes[i]);
    impl->shape.push_back(impl_->shape[i]);
    impl->names.push_back(impl_->names[i]);
  }
  return DeviceMesh(std::move(impl));
}

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  return a.impl_->grid == b.impl_->grid && a.impl_->axes == b.impl_->axes;
}

DeviceMesh init_device_mesh(std::shared_ptr<World> world, std::vector<int64_t> shape, std::vector<std::string> names) {
  if (!world) throw ValueError("init_device_mesh: the world is null");
  if (shape.empty()) throw ValueError("init_device_mesh: expected at least one axis");
  if (names.empty())
    for (size_t i = 0; i < shape.size(); ++i) names.push_back(fmt::format("dim{}", i));
  if (names.size() != shape.size())
    throw ValueError(
        fmt::format("init_device_mesh: expected one name per axis ({}), got {}", shape.size(), names.size()));
  std::set<std::string> distinct;
  int64_t product = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (names[i].empty()) throw ValueError(fmt::format("init_device_mesh: the name of axis {} is empty", i));
    if (!distinct.insert(names[i]).second)
      throw ValueError(fmt::format("init_device_mesh: two axes are named '{}'", names[i]));
    if (shape[i] < 1)
      throw ValueError(fmt::format("init_device_mesh: axis '{}' has size {}; expected at least 1", names[i], shape[i]));
    if (__builtin_mul_overflow(product, shape[i], &product))
      throw ValueError("init_device_mesh: the mesh is too large");
  }
  if (product != world->size())
    throw ValueError(fmt::format("init_device_mesh: a mesh of {} has {} ranks, the world has {}",
                                 fmt::join(shape, " x "), product, world->size()));
  auto grid = std::make_shared<MeshGrid>();
  grid->world = std::move(world);
  grid->id = grid->world->next_mesh_id();
  grid->coordinates.resize(shape.size());
  int64_t rest = grid->world->rank();
  for (size_t i = shape.size(); i-- > 0;) {
    grid->coordinates[i] = rest % shape[i];
    rest /= shape[i];
  }
  grid->shape = shape;
  grid->names = names;
  auto impl = std::make_shared<DeviceMesh::Impl>();
  impl->grid = std::move(grid);
  impl->axes.resize(shape.size());
  std::iota(impl->axes.begin(), impl->axes.end(), 0);
  impl->shape = std::move(shape);
  impl->names = std::move(names);
  return DeviceMesh(std::move(impl));
}

}  // namespace fsdp
