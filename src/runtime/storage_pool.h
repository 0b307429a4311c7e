#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include <ATen/core/Tensor.h>

namespace fsdp::detail {

/// Memory of transient flat buffers (gathered weights, packed gradients). On CPU a fresh page costs more than moving
/// its contents, so released blocks are kept for the next buffer of the same size; elsewhere the device's caching
/// allocator does that already. Holds at most what was in use at once.
class StoragePool {
 public:
  explicit StoragePool(c10::Device device) : device_(device) {}

  /// Gives an empty storage memory. Its StorageImpl stays the same object: autograd may have saved views of it.
  void fill(const c10::Storage& storage, size_t bytes);
  /// Takes a storage's memory; views stay valid as metadata.
  void drain(const c10::Storage& storage);
  /// A filled storage that will not be drained.
  void forget(size_t bytes) { used_ -= bytes; }

  size_t used_bytes() const { return used_; }
  size_t peak_bytes() const { return peak_; }
  void reset_peak() { peak_ = used_; }
  /// Bytes kept but not in use.
  size_t idle_bytes() const;

 private:
  c10::Device device_;
  size_t used_ = 0, peak_ = 0;
  std::multimap<size_t, c10::DataPtr> idle_;
};

/// A flat tensor whose memory comes from the pool and goes back when it is destroyed.
class PooledTensor {
 public:
  PooledTensor() = default;
  PooledTensor(std::shared_ptr<StoragePool> pool, int64_t elements, at::ScalarType dtype, c10::Device device);
  PooledTensor(PooledTensor&&) noexcept = default;
  PooledTensor& operator=(PooledTensor&& other) noexcept;
  ~PooledTensor();

  const at::Tensor& tensor() const { return tensor_; }
  explicit operator bool() const { return tensor_.defined(); }
  void reset();
  /// Lets go without giving the memory to the next user: a transport that failed may still hold and write it.
  void abandon();

 private:
  std::shared_ptr<StoragePool> pool_;
  at::Tensor tensor_;
};

/// Gives a storage's memory back to its allocator; views stay valid as metadata.
void drain_storage(const c10::Storage& storage);
/// A flat tensor of the given size whose storage is empty.
at::Tensor drained_tensor(int64_t elements, at::ScalarType dtype, c10::Device device);

}  // namespace fsdp::detail
