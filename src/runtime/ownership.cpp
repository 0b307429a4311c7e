#include "runtime/ownership.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/fully_shard.h>

#include "runtime/registry.h"
#include "runtime/unit.h"

namespace fsdp::detail {
namespace {

std::string shape_text(const at::Tensor& t) { return fmt::format("[{}]", fmt::join(t.sizes(), ", ")); }

class Collector {
 public:
  Collector(const ContextState& context, const std::vector<at::Tensor>& ignored)
      : context_(context), ignored_(ignored) {}

  void visit(torch::nn::Module& module, const std::string& prefix) {
    for (const auto& p : module.named_parameters(/*recurse=*/false))
      if (p.value().defined()) add(module, prefix, p.key(), p.value());
    for (const auto& child : module.named_children()) {
      if (!child.value()) continue;
      const auto path = prefix + child.key();
      if (auto* unit = get_fsdp_module(*child.value())) {
        check_context(unit_of(*unit), path);
        continue;
      }
      // A module registered twice is visited twice: its parameters then have two names.
      visit(*child.value(), path + ".");
    }
  }

  Ownership finish() {
    Ownership result;
    std::vector<std::pair<at::ScalarType, bool>> keys;
    for (auto& p : parameters_) {
      const std::pair key{p.tensor.scalar_type(), p.tensor.requires_grad()};
      auto it = std::find(keys.begin(), keys.end(), key);
      const auto index = static_cast<size_t>(it - keys.begin());
      if (it == keys.end()) {
        keys.push_back(key);
        result.groups.emplace_back();
      }
      result.groups[index].push_back(std::move(p));
    }
    result.lenders = std::move(lenders_);
    return result;
  }

 private:
  void add(torch::nn::Module& module, const std::string& prefix, const std::string& key, const at::Tensor& tensor) {
    const auto name = prefix + key;
    if (std::any_of(ignored_.begin(), ignored_.end(), [&](const auto& t) { return t.is_same(tensor); })) return;
    if (auto owner = registry::owner(tensor.unsafeGetTensorImpl())) {
      check_context(*owner, name);
      if (std::find(lenders_.begin(), lenders_.end(), owner) == lenders_.end()) lenders_.push_back(owner);
      return;
    }
    auto [it, fresh] = index_.emplace(tensor.unsafeGetTensorImpl(), parameters_.size());
    if (fresh) {
      check(name, tensor);
      parameters_.push_back({tensor, {}, {}});
    }
    parameters_[it->second].names.push_back(name);
    parameters_[it->second].registrations.push_back({module.weak_from_this(), key});
  }

  void check_context(const Unit& unit, const std::string& where) const {
    if (unit.context_state.get() != &context_)
      throw ValueError(
          fmt::format("fully_shard: '{}' belongs to unit '{}' of another context; shard a model's units in one "
                      "context",
                      where, unit.display_name()));
  }

  static void check(const std::string& name, const at::Tensor& t) {
    const auto type = t.scalar_type();
    if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16)
      throw ValueError(
          fmt::format("fully_shard: parameter '{}' {} has dtype {}; expected float64, float32, bfloat16 or "
                      "float16. Register it as a buffer, or keep it outside the sharded module",
                      name, shape_text(t), c10::toString(type)));
    if (t.layout() != at::kStrided)
      throw ValueError(fmt::format("fully_shard: parameter '{}' {} is not a dense tensor", name, shape_text(t)));
    if (!t.is_leaf())
      throw ValueError(
          fmt::format("fully_shard: parameter '{}' {} is the result of an operation, not a leaf; register its "
                      "detached value instead",
                      name, shape_text(t)));
    if (t.grad().defined())
      throw ValueError(fmt::format("fully_shard: parameter '{}' {} already has a gradient; clear it (zero_grad) first",
                                   name, shape_text(t)));
  }

  const ContextState& context_;
  const std::vector<at::Tensor>& ignored_;
  std::vector<ParameterInfo> parameters_;
  std::unordered_map<const c10::TensorImpl*, size_t> index_;
  std::vector<std::shared_ptr<Unit>> lenders_;
};

}  // namespace

Ownership collect_ownership(torch::nn::Module& module, const ContextState& context,
                            const std::vector<at::Tensor>& ignored) {
  Collector collector(context, ignored);
  collector.visit(module, "");
  return collector.finish();
}

}  // namespace fsdp::detail
