#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fsdp::detail {

struct Unit;

/// The dispatch key that makes operators on managed parameters enter the library (see operator_hooks.cpp). PyTorch
/// reserves it for libraries outside; it lies above autograd.
constexpr auto kHookKey = c10::DispatchKey::DeferredInit;

/// Adds the key to a tensor. A handle gets it with the view it is pointed at (shallow copies take the key set along).
void add_hook_key(const at::Tensor& tensor);
bool has_hook_key(const at::Tensor& tensor);

/// The library's own operations on managed tensors must not be taken for the user's.
struct Unhooked {
  c10::impl::ExcludeDispatchKeyGuard guard{kHookKey};
};

/// What an operator's argument means to the library.
struct Managed {
  enum class Kind { kNone, kHandle, kFullStorage, kMainStorage, kUnreducedGradient };
  Kind kind = Kind::kNone;
  std::shared_ptr<Unit> unit;
};

/// Process-wide, since autograd threads and ranks as threads share it; internally locked. Entries are removed by their
/// owners before the address can be used again.
namespace registry {
void add_handle(const c10::TensorImpl* handle, const std::weak_ptr<Unit>& unit);
void remove_handle(const c10::TensorImpl* handle);
void add_storage(const c10::StorageImpl* storage, const std::weak_ptr<Unit>& unit, Managed::Kind kind);
void remove_storage(const c10::StorageImpl* storage);
Managed find(const at::Tensor& tensor);
/// Unit that owns a parameter handle, or null.
std::shared_ptr<Unit> owner(const c10::TensorImpl* handle);
}  // namespace registry

}  // namespace fsdp::detail
