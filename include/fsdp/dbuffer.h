#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/distributed/device_mesh.h>
#include <fsdp/layout.h>
#include <fsdp/placement.h>

namespace fsdp {

/// Half-open range of elements of a global buffer.
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const ElementRange&, const ElementRange&) = default;
};

/// A group of logical tensors in one flat buffer, of which this rank holds one contiguous range, as its placements
/// on the axes of a mesh say. Sharded axes come last (inside the others); with several, the innermost is the most
/// significant. A handle: copies share the storage. Owned by one thread of a rank at a time; the functions that
/// communicate are collective over the mesh and must be called in the same order on all its ranks.
class DBuffer {
 public:
  /// Zero-filled buffer for tensors of these shapes. ValueError: placements that do not match the mesh in number, a
  /// plain Shard (only fully_shard converts it), a Partial other than sum or average, a sharded axis outside a
  /// replicated one, sharding kinds mixed, TensorAtomic (which needs owners, so a layout: see below).
  DBuffer(DeviceMesh mesh, std::vector<Placement> placements, std::vector<Shape> shapes, at::ScalarType dtype,
          ShardLayout layout = ShardLayout::kPadded);
  /// As above over a layout planned elsewhere, with one segment per rank of the mesh.
  DBuffer(DeviceMesh mesh, std::vector<Placement> placements, std::shared_ptr<const GlobalLayout> layout,
          at::ScalarType dtype);
  /// Uses `local` (flat, contiguous, of exactly this rank's range) instead of allocating. ValueError if it does not
  /// fit.
  static DBuffer wrap(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                      std::shared_ptr<const GlobalLayout> layout);
  /// Takes this rank's range from full tensors (equal on all ranks unless Partial), without communication. Tensors of
  /// one dtype, on any device, any strides; a meta tensor leaves its rows uninitialised (zero).
  static DBuffer distribute_tensors(at::TensorList full, DeviceMesh mesh, std::vector<Placement> placements,
                                    ShardLayout layout = ShardLayout::kPadded);

  /// The same tensors under other placements: a composition of single-axis collectives, sharding leaves from the
  /// outermost axis in, everything else changes from the innermost axis out. The source is unchanged; the result
  /// shares its storage when nothing has to move. ValueError: a change no collective makes (Shard to Partial,
  /// Replicate to Partial(sum)).
  DBuffer redistribute(std::vector<Placement> placements) const;
  /// The same tensors in another layout (padded, unpadded, by owners), under other placements, on this or another mesh
  /// of the same ranks: one all-to-all in which every row is sent once to each rank that lacks it. Collective over the
  /// ranks of this mesh. ValueError: other ranks, another device, tensors of other shapes, or partial sums on either
  /// side (reduce them first, with the function above).
  DBuffer redistribute(DeviceMesh mesh, std::vector<Placement> placements,
                       std::shared_ptr<const GlobalLayout> layout) const;
  /// As redistribute(placements), into `out`; ValueError naming the field if mesh, layout, dtype or device differ.
  void redistribute_into(DBuffer& out) const;
  /// Same values in another dtype; the same buffer when it already has it.
  DBuffer cast(at::ScalarType dtype) const;
  /// Copies values, with conversion, into `out` (same mesh, placements and layout).
  void cast_into(DBuffer& out) const;

  /// This rank's range: flat, contiguous.
  at::Tensor local_buffer() const { return local_; }
  /// This rank's rows of tensor `index`: a contiguous [local_rows, ...] view of local_buffer(). With no local row an
  /// empty tensor of leading dimension 0.
  at::Tensor local_tensor(int64_t index) const;
  /// Rows of tensor `index` in this rank's range.
  GlobalLayout::Rows local_rows(int64_t index) const;
  /// This rank's range in elements of the global buffer.
  ElementRange range() const { return range_; }

  /// Gives the memory back; the Storage object and all views stay valid as metadata. Idempotent.
  void release_storage();
  /// Gives the same Storage object memory again, uninitialised. Idempotent.
  void reallocate_storage();

  const GlobalLayout& layout() const { return *layout_; }
  const std::shared_ptr<const GlobalLayout>& shared_layout() const { return layout_; }
  const std::vector<Placement>& placements() const { return placements_; }
  const DeviceMesh& mesh() const { return mesh_; }
  at::ScalarType dtype() const { return local_.scalar_type(); }
  /// Bytes this rank holds now (0 while released).
  int64_t local_bytes() const;

 private:
  struct Wrapped {};
  DBuffer(Wrapped, at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
          std::shared_ptr<const GlobalLayout> layout, ElementRange range);

  DeviceMesh mesh_;
  std::vector<Placement> placements_;
  std::shared_ptr<const GlobalLayout> layout_;
  ElementRange range_;
  at::Tensor local_;
};

}  // namespace fsdp
