#pragma once

#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <fsdp/error.h>
#include <fsdp/outputs.h>

namespace fsdp {

namespace detail {
/// A part of a forward as a function of tensors only.
using Segment = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> run_checkpointed(Segment segment, std::vector<at::Tensor> inputs);
}  // namespace detail

/// fn(inputs...), keeping only the inputs: backward runs `fn` a second time, with the same random state and autocast
/// settings, and differentiates that run. Saves the memory of what lies between, for one more forward's time.
///
/// `fn` is copied and must do the same both times. It takes and returns tensors, and tuples, vectors, maps, optionals,
/// numbers and structs as in fsdp/outputs.h; tensors it captures rather than takes get their gradients too. Works
/// inside units and around them, nested, and without any unit. A unit is gathered once for the second run and its
/// backward. Without grad mode it only calls `fn`. Backward needs backward(), not autograd::grad(), which throws
/// StateError; what `fn` throws in the second run comes out of backward.
template <class F, class... Inputs>
auto checkpoint(F fn, Inputs&&... inputs) {
  using Arguments = std::tuple<std::decay_t<Inputs>...>;
  using Output = std::decay_t<decltype(std::apply(fn, std::declval<Arguments&>()))>;
  Arguments arguments(std::forward<Inputs>(inputs)...);
  if (!c10::GradMode::is_enabled()) return Output(std::apply(fn, arguments));

  std::vector<at::Tensor> tensors;
  visit_tensors(
      [&](at::Tensor& t) {
        tensors.push_back(t);
        t = t.detach();  // the copy marks the place only; it must not keep the inputs' graph
      },
      arguments);
  std::optional<Output> first;
  auto run = [fn = std::move(fn), arguments = std::move(arguments)](const std::vector<at::Tensor>& given,
                                                                    std::optional<Output>* output) mutable {
    Arguments mine = arguments;
    size_t i = 0;
    visit_tensors([&](at::Tensor& t) { t = given[i++]; }, mine);
    Output result = std::apply(fn, mine);
    std::vector<at::Tensor> results;
    visit_tensors([&](at::Tensor& t) { results.push_back(t); }, result);
    if (output) output->emplace(std::move(result));
    return results;
  };
  // The first run also leaves its output's structure in `first`, which the returned tensors are then put into.
  auto* output = &first;
  auto outputs = detail::run_checkpointed(
      [run = std::move(run), output](const std::vector<at::Tensor>& given) mutable {
        return run(given, std::exchange(output, nullptr));
      },
      std::move(tensors));
  size_t i = 0;
  visit_tensors([&](at::Tensor& t) { t = outputs[i++]; }, *first);
  return std::move(*first);
}

}  // namespace fsdp
