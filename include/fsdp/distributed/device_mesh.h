#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <fsdp/distributed/communicator.h>
#include <fsdp/distributed/world.h>
#include <fsdp/placement.h>

namespace fsdp {

/// What a communicator of an axis is for. Each has its own, so that a prefetched gather never queues
/// behind a reduction.
enum class Channel { kDefault, kGather, kReduce, kControl };

/// The world's ranks as an n-dimensional grid with named axes, row-major (the last axis varies
/// fastest), as torch.distributed.init_device_mesh. A small handle: copies share the communicators
/// and keep the world alive. One thread of a rank uses it at a time.
class DeviceMesh {
 public:
  int64_t ndim() const;
  int64_t size() const;  ///< ranks in the mesh
  int64_t size(const MeshAxis& axis) const;
  int64_t rank() const;  ///< this rank's row-major index in the mesh
  /// This rank's coordinate on `axis`.
  int64_t local_rank(const MeshAxis& axis) const;
  const std::vector<std::string>& axis_names() const;
  const std::vector<int64_t>& shape() const;
  c10::Device device() const;
  World& world() const;
  /// The mesh's ranks as the world numbers them, in the mesh's order.
  std::vector<int64_t> world_ranks() const;

  /// Index of an axis in [0, ndim()). ValueError for an unknown name or an index out of range.
  int64_t axis_index(const MeshAxis& axis) const;

  /// Communicator among the ranks that differ from this one on `axis` only. Created at first use,
  /// which is collective among those ranks.
  Communicator& communicator(const MeshAxis& axis, Channel channel = Channel::kDefault) const;
  /// Communicator among all ranks of this mesh.
  Communicator& communicator_all(Channel channel = Channel::kDefault) const;

  /// The mesh of some axes, in the order given, which must be their order here (ValueError naming
  /// the axis otherwise, or when one is named twice). Shares this mesh's axis communicators. An
  /// empty list gives a mesh of one rank.
  DeviceMesh sub(std::span<const MeshAxis> axes) const;

  /// Same communicators, same axes.
  friend bool operator==(const DeviceMesh&, const DeviceMesh&);

  struct Impl;
  explicit DeviceMesh(std::shared_ptr<const Impl> impl);
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// ValueError unless the product of `shape` is the world's size, every entry is positive, and the
/// names (default "dim0", "dim1", ...) are as many, non-empty and distinct.
DeviceMesh init_device_mesh(std::shared_ptr<World> world, std::vector<int64_t> shape,
                            std::vector<std::string> names = {});

}  // namespace fsdp
