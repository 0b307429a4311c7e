#include "runtime/registry.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "runtime/unit.h"

namespace fsdp::detail {
namespace {

/// key_set_ is protected; a pointer to it formed in a derived class is the language's own way in.
struct KeySetAccess : c10::TensorImpl {
  static constexpr auto member() { return &KeySetAccess::key_set_; }
};

struct Tables {
  std::shared_mutex mutex;
  std::unordered_map<const c10::TensorImpl*, std::weak_ptr<Unit>> handles;
  std::unordered_map<const c10::StorageImpl*, std::pair<std::weak_ptr<Unit>, Managed::Kind>> storages;
};

/// Never destroyed: modules with static storage duration may unregister after it would have been.
Tables& tables() {
  static auto* t = new Tables;
  return *t;
}

}  // namespace

void add_hook_key(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->*KeySetAccess::member() = impl->key_set().add(kHookKey);
}

bool has_hook_key(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->key_set().has(kHookKey); }

namespace registry {

void add_handle(const c10::TensorImpl* handle, const std::weak_ptr<Unit>& unit) {
  std::unique_lock lock(tables().mutex);
  tables().handles[handle] = unit;
}

void remove_handle(const c10::TensorImpl* handle) {
  std::unique_lock lock(tables().mutex);
  tables().handles.erase(handle);
}

void add_storage(const c10::StorageImpl* storage, const std::weak_ptr<Unit>& unit, Managed::Kind kind) {
  std::unique_lock lock(tables().mutex);
  tables().storages[storage] = {unit, kind};
}

void remove_storage(const c10::StorageImpl* storage) {
  std::unique_lock lock(tables().mutex);
  tables().storages.erase(storage);
}

Managed find(const at::Tensor& tensor) {
  std::shared_lock lock(tables().mutex);
  if (auto it = tables().handles.find(tensor.unsafeGetTensorImpl()); it != tables().handles.end())
    return {Managed::Kind::kHandle, it->second.lock()};
  if (!tensor.has_storage()) return {};
  auto it = tables().storages.find(tensor.storage().unsafeGetStorageImpl());
  if (it == tables().storages.end()) return {};
  return {it->second.second, it->second.first.lock()};
}

std::shared_ptr<Unit> owner(const c10::TensorImpl* handle) {
  std::shared_lock lock(tables().mutex);
  auto it = tables().handles.find(handle);
  return it == tables().handles.end() ? nullptr : it->second.lock();
}

}  // namespace registry
}  // namespace fsdp::detail
