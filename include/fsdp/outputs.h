#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

/// Finding the tensors in what a module's forward takes and returns, so that a unit's backward can be hooked to them.
namespace fsdp {

/// Customization point: tensors inside a value of type T. Known: tensors, arithmetic types, enums, strings, and tuples,
/// pairs, vectors, arrays, maps and optionals of known types. For a struct of yours,
///
///   template <> struct fsdp::Tensors<MyOutput> {
///     template <class F> static void visit(MyOutput& o, F&& f) { fsdp::visit_tensors(f, o.logits, o.loss); }
///   };
template <class T, class = void>
struct Tensors {
  static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_null_pointer_v<T>,
                "fsdp does not know which tensors are in this output of a Hooked module's forward: specialise "
                "fsdp::Tensors<T> (see fsdp/outputs.h)");
  template <class F>
  static void visit(T&, F&&) {}
};

/// Calls `f(at::Tensor&)` for each defined tensor in the values.
template <class F, class... Ts>
void visit_tensors(F&& f, Ts&... values) {
  (Tensors<std::remove_cv_t<Ts>>::visit(const_cast<std::remove_cv_t<Ts>&>(values), f), ...);
}

template <>
struct Tensors<at::Tensor> {
  template <class F>
  static void visit(at::Tensor& t, F&& f) {
    if (t.defined()) f(t);
  }
};

template <class C, class Tr, class A>
struct Tensors<std::basic_string<C, Tr, A>> {
  template <class F>
  static void visit(std::basic_string<C, Tr, A>&, F&&) {}
};

template <class... Ts>
struct Tensors<std::tuple<Ts...>> {
  template <class F>
  static void visit(std::tuple<Ts...>& t, F&& f) {
    std::apply([&](auto&... e) { visit_tensors(f, e...); }, t);
  }
};

template <class A, class B>
struct Tensors<std::pair<A, B>> {
  template <class F>
  static void visit(std::pair<A, B>& p, F&& f) {
    visit_tensors(f, p.first, p.second);
  }
};

template <class T>
struct Tensors<std::optional<T>> {
  template <class F>
  static void visit(std::optional<T>& o, F&& f) {
    if (o) visit_tensors(f, *o);
  }
};

namespace detail {
template <class Range>
struct RangeTensors {
  template <class F>
  static void visit(Range& range, F&& f) {
    if constexpr (!std::is_arithmetic_v<typename Range::value_type>)
      for (auto& e : range) visit_tensors(f, e);
  }
};
}  // namespace detail

template <class T, class A>
struct Tensors<std::vector<T, A>> : detail::RangeTensors<std::vector<T, A>> {};
template <class T, size_t N>
struct Tensors<std::array<T, N>> : detail::RangeTensors<std::array<T, N>> {};
template <class K, class V, class C, class A>
struct Tensors<std::map<K, V, C, A>> : detail::RangeTensors<std::map<K, V, C, A>> {};
template <class K, class V, class H, class E, class A>
struct Tensors<std::unordered_map<K, V, H, E, A>> : detail::RangeTensors<std::unordered_map<K, V, H, E, A>> {};

}  // namespace fsdp
