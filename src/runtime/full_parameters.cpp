#include <unordered_set>

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <fsdp/fully_shard.h>
#include <fsdp/module.h>

#include "runtime/unit.h"

namespace fsdp {
namespace {

/// Units under a module, the module's own first, each once, in registration order.
void collect_units(const torch::nn::Module& module, std::unordered_set<const torch::nn::Module*>& seen,
                   std::vector<std::shared_ptr<detail::Unit>>& units) {
  if (!seen.insert(&module).second) return;
  if (auto* unit = get_fsdp_module(module)) units.push_back(detail::unit_of(*unit).shared_from_this());
  for (const auto& child : module.children()) collect_units(*child, seen, units);
}

}  // namespace

std::vector<at::Tensor> parameters(torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& p : module.parameters())
    if (seen.insert(p.unsafeGetTensorImpl()).second) result.push_back(p);
  return result;
}

struct FullParameters::Impl {
  std::vector<std::shared_ptr<detail::Unit>> units;
  std::vector<detail::Group*> shown;
  bool write_back;
};

FullParameters::FullParameters(torch::nn::Module& module, bool write_back) : impl_(std::make_unique<Impl>()) {
  impl_->write_back = write_back;
  std::unordered_set<const torch::nn::Module*> seen;
  collect_units(module, seen, impl_->units);
  // Lent weights are parameters of this module too.
  for (size_t i = 0; i < impl_->units.size(); ++i)
    for (const auto& weak : impl_->units[i]->lenders)
      if (auto lender = weak.lock();
          lender && std::find(impl_->units.begin(), impl_->units.end(), lender) == impl_->units.end())
        impl_->units.push_back(lender);
  for (const auto& unit : impl_->units) {
    unit->context_state->require_finalized("FullParameters");
    unit->context_state->end_operator_forwards(nullptr);
    if (unit->phase() != FsdpModule::Phase::kResting)
      throw StateError(fmt::format("FullParameters: unit '{}' is in phase {}; use it between forward and backward",
                                   unit->display_name(), to_string(unit->phase())));
    unit->check_groups();
  }
  try {
    for (const auto& unit : impl_->units) {
      unit->release();
      for (const auto& group : unit->groups) {
        if (group->shows_full_main()) continue;  // an enclosing scope shows it, and writes it back
        group->show_full_main(unit->label);
        impl_->shown.push_back(group.get());
      }
    }
  } catch (...) {
    for (auto* group : impl_->shown) group->hide_full_main(false);
    throw;
  }
}

FullParameters::~FullParameters() {
  for (auto* group : impl_->shown) group->hide_full_main(impl_->write_back);
}

}  // namespace fsdp
