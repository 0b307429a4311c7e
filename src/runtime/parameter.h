#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>

#include <fsdp/dbuffer.h>
#include <fsdp/layout.h>

namespace fsdp::detail {

/// One physical parameter of a unit, found under one or more names. Everything here is known before anything changes.
struct ParameterInfo {
  struct Registration {
    std::weak_ptr<torch::nn::Module> module;
    std::string key;
  };
  at::Tensor tensor;
  std::vector<std::string> names;           // relative to the unit
  std::vector<Registration> registrations;  // as many
};

/// How a parameter's elements lie in the flat buffer: rows (dimension 0) one after the other, each row in the memory
/// order the parameter had (so a channels-last weight stays channels-last). A 0-dim parameter is one row.
struct ParameterShape {
  explicit ParameterShape(const at::Tensor& parameter);

  std::vector<int64_t> sizes;
  std::vector<int64_t> order;    // dimensions in memory order; order[0] == 0
  std::vector<int64_t> inverse;  // of order
  Shape planned;                 // what the planner sees

  /// The [rows, ...] view of `rows` rows that start at element `offset` of `flat`.
  at::Tensor view(const at::Tensor& flat, int64_t offset, int64_t rows) const;
  /// As view, of the rows of tensor `index` of `layout` that lie in `range`, which `flat` covers.
  at::Tensor rows(const at::Tensor& flat, const GlobalLayout& layout, const ElementRange& range, int64_t index) const;
  /// As view, of the whole parameter in its own shape.
  at::Tensor whole(const at::Tensor& flat, int64_t offset) const;
};

/// The user's one handle of a parameter. Held weakly: the module owns it. Its address is not used again while this
/// lives, which the registry relies on.
class Handle {
 public:
  explicit Handle(const at::Tensor& parameter) : weak_(parameter.getIntrusivePtr()) {}
  at::Tensor lock() const;  // undefined when the module let it go
  const c10::TensorImpl* address() const { return weak_._unsafe_get_target(); }
  /// Makes the handle show `view`: its storage, shape, dtype and key set. Autograd state and version counter stay.
  void show(const at::Tensor& view) const;

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak_;
};

}  // namespace fsdp::detail
