#include "runtime/storage_pool.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

namespace fsdp::detail {

void StoragePool::fill(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr memory;
  if (auto it = idle_.find(bytes); it != idle_.end()) {
    memory = std::move(it->second);
    idle_.erase(it);
  } else {
    memory = c10::GetAllocator(device_.type())->allocate(bytes);
  }
  // noswap: neither the version counter nor the storage's identity changes, so tensors saved for backward stay valid.
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
  used_ += bytes;
  peak_ = std::max(peak_, used_);
}

void StoragePool::drain(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  const size_t bytes = impl->nbytes();
  if (bytes == 0) return;
  auto memory = impl->set_data_ptr(c10::DataPtr(nullptr, impl->device()));
  impl->set_nbytes(0);
  used_ -= bytes;
  if (device_.is_cpu()) idle_.emplace(bytes, std::move(memory));
}

size_t StoragePool::idle_bytes() const {
  size_t total = 0;
  for (const auto& [bytes, memory] : idle_) total += bytes;
  return total;
}

void drain_storage(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(c10::DataPtr(nullptr, impl->device()));
  impl->set_nbytes(0);
}

at::Tensor drained_tensor(int64_t elements, at::ScalarType dtype, c10::Device device) {
  auto tensor = at::empty({elements}, at::TensorOptions().dtype(dtype).device(device));
  drain_storage(tensor.storage());
  return tensor;
}

PooledTensor::PooledTensor(std::shared_ptr<StoragePool> pool, int64_t elements, at::ScalarType dtype,
                           c10::Device device)
    : pool_(std::move(pool)), tensor_(drained_tensor(elements, dtype, device)) {
  if (elements > 0) pool_->fill(tensor_.storage(), static_cast<size_t>(elements) * tensor_.element_size());
}

PooledTensor& PooledTensor::operator=(PooledTensor&& other) noexcept {
  reset();
  pool_ = std::move(other.pool_);
  tensor_ = std::move(other.tensor_);
  other.tensor_ = at::Tensor();
  return *this;
}

PooledTensor::~PooledTensor() { reset(); }

void PooledTensor::abandon() {
  if (tensor_.defined()) pool_->forget(tensor_.storage().nbytes());
  tensor_ = at::Tensor();
}

void PooledTensor::reset() {
  if (tensor_.defined()) pool_->drain(tensor_.storage());
  tensor_ = at::Tensor();
}

}  // namespace fsdp::detail
