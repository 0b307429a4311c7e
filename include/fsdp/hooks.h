#pragma once

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <fsdp/module.h>
#include <fsdp/outputs.h>

namespace fsdp {

namespace detail {

/// The place in a Hooked module where fully_shard puts the unit. The module owns it.
class HookSlot {
 public:
  const std::shared_ptr<FsdpModule>& unit() const { return unit_; }
  void attach(std::shared_ptr<FsdpModule> unit) { unit_ = std::move(unit); }

 protected:
  HookSlot() = default;
  HookSlot(const HookSlot&) {}  // a copied module is not sharded
  HookSlot& operator=(const HookSlot&) { return *this; }
  ~HookSlot() = default;

 private:
  std::shared_ptr<FsdpModule> unit_;
};

/// Brackets one forward of a unit, also when it throws. Does nothing where the unit's policy says that module hooks
/// do not drive it.
class ForwardGuard {
 public:
  explicit ForwardGuard(std::shared_ptr<FsdpModule> unit);
  ~ForwardGuard();
  ForwardGuard(const ForwardGuard&) = delete;
  ForwardGuard& operator=(const ForwardGuard&) = delete;

  /// Hooks a tensor on its way in or out, after replacing it by a cast where the unit was given one.
  void input(at::Tensor& tensor);
  void output(at::Tensor& tensor);
  /// The forward returned; without this the destructor undoes it as for an exception.
  void finish();

 private:
  std::shared_ptr<FsdpModule> unit_;
  bool driven_, finished_ = false;
};

/// StateErrors that name the right call, for a module with units in it; nothing otherwise.
void refuse_save(const torch::nn::Module& module);
void refuse_load(const torch::nn::Module& module);
void refuse_clone(const torch::nn::Module& module);

template <class F>
struct Signature;
template <class C, class R, class... A>
struct Signature<R (C::*)(A...)> {
  using type = R(A...);
};
template <class C, class R, class... A>
struct Signature<R (C::*)(A...) const> : Signature<R (C::*)(A...)> {};
template <class C, class R, class... A>
struct Signature<R (C::*)(A...) noexcept> : Signature<R (C::*)(A...)> {};
template <class C, class R, class... A>
struct Signature<R (C::*)(A...) const noexcept> : Signature<R (C::*)(A...)> {};

/// Arguments whose tensors matter: they tell when a frozen unit's backward is over, and may have to be cast.
template <class T>
inline constexpr bool kHoldsTensors = std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>> ||
                                      std::is_same_v<T, std::vector<at::Tensor>>;

template <class Impl, class F>
class HookedForward;
template <class Impl, class R, class... A>
class HookedForward<Impl, R(A...)> : public Impl, public HookSlot {
 public:
  using Impl::Impl;

  /// Exactly Impl's signature, so that calls through the holder, AnyModule, Sequential and `->forward` are all hooked.
  R forward(A... arguments) {
    if (!unit()) return Impl::forward(std::forward<A>(arguments)...);
    ForwardGuard guard(unit());
    if constexpr (std::is_void_v<R>) {
      Impl::forward(guarded<A>(guard, arguments)...);
      guard.finish();
    } else {
      R result = Impl::forward(guarded<A>(guard, arguments)...);
      visit_tensors([&](at::Tensor& t) { guard.output(t); }, result);
      guard.finish();
      return static_cast<R>(result);
    }
  }

 private:
  /// What Impl's forward gets for an argument: a value or const reference with tensors in it is copied (handles, not
  /// data), so that the guard may replace them. Where the caller could see another object, its own is passed.
  template <class T>
  static decltype(auto) guarded(ForwardGuard& guard, std::remove_reference_t<T>& argument) {
    using Value = std::remove_cv_t<std::remove_reference_t<T>>;
    constexpr bool replaceable = std::is_same_v<T, Value> || std::is_same_v<T, const Value&>;
    if constexpr (kHoldsTensors<Value> && replaceable && !std::is_reference_v<R>) {
      Value value = std::forward<T>(argument);
      visit_tensors([&](at::Tensor& t) { guard.input(t); }, value);
      return value;
    } else {
      return std::forward<T>(argument);
    }
  }
};

}  // namespace detail

/// `Impl` with a hooked forward(): what fully_shard needs to bracket forward and backward exactly. Behaves as Impl
/// until it is sharded. Impl::forward must not be overloaded or a template; default arguments do not carry over.
template <class Impl>
class Hooked : public detail::HookedForward<Impl, typename detail::Signature<decltype(&Impl::forward)>::type> {
  using Base = detail::HookedForward<Impl, typename detail::Signature<decltype(&Impl::forward)>::type>;

 public:
  using Base::Base;
  using Base::forward;

  /// StateError once the module holds sharded parameters: save_checkpoint or save_safetensors write whole tensors.
  void save(torch::serialize::OutputArchive& archive) const override {
    detail::refuse_save(*this);
    Impl::save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    detail::refuse_load(*this);
    Impl::load(archive);
  }
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    detail::refuse_clone(*this);
    return Impl::clone(device);
  }
};

/// As TORCH_MODULE(Name), the holder's module being Hooked<NameImpl>.
#define FSDP_MODULE(Name)                                                  \
  class Name : public torch::nn::ModuleHolder<fsdp::Hooked<Name##Impl>> {  \
   public:                                                                 \
    using torch::nn::ModuleHolder<fsdp::Hooked<Name##Impl>>::ModuleHolder; \
    using Impl [[maybe_unused]] = fsdp::Hooked<Name##Impl>;                \
  }

}  // namespace fsdp
