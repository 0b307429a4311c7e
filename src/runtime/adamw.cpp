#include <fsdp/adamw.h>

#include <algorithm>

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "runtime/registry.h"
#include "runtime/unit.h"

namespace fsdp::optim {

using detail::Group;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;

/// Moments of one group, as long as this rank's range of its main weights. Padding has no gradient, so its moments stay
/// zero and the update leaves it as it is, but for the decay.
struct AdamW::Flat {
  explicit Flat(const at::Tensor& weights) : of(weights.getIntrusivePtr()) {}

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> of;  // no other buffer gets its address meanwhile
  at::Tensor exp_avg, exp_avg_sq, max_exp_avg_sq;                         // the last with amsgrad only
};

/// The tensors of one call of the kernel.
struct AdamW::Batch {
  std::vector<at::Tensor> weights, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;

  void add(const at::Tensor& weight, const at::Tensor& gradient, const at::Tensor& exp_avg,
           const at::Tensor& exp_avg_sq, const at::Tensor& max_exp_avg_sq, int64_t step) {
    if (weight.numel() == 0) return;
    weights.push_back(weight);
    gradients.push_back(gradient.to(weight.scalar_type()));
    exp_avgs.push_back(exp_avg);
    exp_avg_sqs.push_back(exp_avg_sq);
    if (max_exp_avg_sq.defined()) max_exp_avg_sqs.push_back(max_exp_avg_sq);
    steps.push_back(at::full({}, static_cast<double>(step), weight.options().dtype(at::kFloat)));
  }

  void run(const AdamWOptions& o) const {
    if (weights.empty()) return;
    const auto [beta1, beta2] = o.betas();
    at::_fused_adamw_(weights, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, o.lr(), beta1, beta2,
                      o.weight_decay(), o.eps(), o.amsgrad(), /*maximize=*/false);
  }
};

namespace {

/// Every parameter of the group has its gradient where the reduction put it, and all are of one age.
bool in_one_pass(const Group& group, const std::vector<at::Tensor>& members,
                 const std::vector<AdamWParamState*>& states) {
  if (members.size() != group.handles().size()) return false;
  const auto& main = group.gradients()->main_grad().local_buffer();
  for (size_t i = 0; i < members.size(); ++i) {
    const auto& gradient = members[i].grad();
    if (gradient.numel() > 0 && !gradient.is_alias_of(main)) return false;
    if (states[i]->step() != states[0]->step()) return false;
  }
  return true;
}

}  // namespace

AdamW::~AdamW() = default;

AdamWParamState& AdamW::state_of(const at::Tensor& parameter) {
  auto& slot = state_[parameter.unsafeGetTensorImpl()];
  if (!slot) slot = std::make_unique<AdamWParamState>();
  return static_cast<AdamWParamState&>(*slot);
}

/// Adds what a parameter group steps to the batch: whole flat shards where that is possible.
void AdamW::collect(OptimizerParamGroup& param_group, Batch& batch) {
  const bool amsgrad = static_cast<const AdamWOptions&>(param_group.options()).amsgrad();
  struct Members {
    std::vector<at::Tensor> parameters;
    std::vector<size_t> indices;
    std::vector<AdamWParamState*> states;
    std::shared_ptr<detail::Unit> unit;
  };
  std::vector<std::pair<Group*, Members>> groups;
  for (auto& p : param_group.params()) {
    if (!p.grad().defined()) continue;
    auto unit = detail::registry::owner(p.unsafeGetTensorImpl());
    auto& state = state_of(p);
    if (!unit) {
      if (!state.exp_avg().defined()) state.exp_avg(at::zeros_like(p)).exp_avg_sq(at::zeros_like(p));
      if (amsgrad && !state.max_exp_avg_sq().defined()) state.max_exp_avg_sq(at::zeros_like(p));
      state.step(state.step() + 1);
      batch.add(p, p.grad(), state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(), state.step());
      continue;
    }
    const auto place = unit->find(p.unsafeGetTensorImpl());
    auto it = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == place.group; });
    if (it == groups.end()) it = groups.insert(groups.end(), {place.group, Members{}});
    it->second.parameters.push_back(p);
    it->second.indices.push_back(place.index);
    it->second.states.push_back(&state);
    it->second.unit = std::move(unit);
  }
  for (auto& [group, members] : groups) {
    group->invalidate();  // the kernel moves no version counter
    const auto weights = group->main_weight().local_buffer();
    auto& slot = flat_[weights.unsafeGetTensorImpl()];
    if (!slot) slot = std::make_shared<Flat>(weights);
    auto& flat = *slot;
    if (!flat.exp_avg.defined()) flat.exp_avg = at::zeros_like(weights), flat.exp_avg_sq = at::zeros_like(weights);
    if (amsgrad && !flat.max_exp_avg_sq.defined()) flat.max_exp_avg_sq = at::zeros_like(weights);
    // State that load() brought, or that this is the first step of, moves into the flat buffers; what they hold of an
    // earlier life of the state goes.
    auto settle = [&](at::Tensor current, const at::Tensor& buffer, size_t index) {
      auto view = group->rows_of(buffer, index);
      if (!current.defined())
        view.zero_();
      else if (!current.is_alias_of(buffer))
        view.copy_(current);
      return view;
    };
    for (size_t i = 0; i < members.states.size(); ++i) {
      auto& state = *members.states[i];
      state.exp_avg(settle(state.exp_avg(), flat.exp_avg, members.indices[i]));
      state.exp_avg_sq(settle(state.exp_avg_sq(), flat.exp_avg_sq, members.indices[i]));
      if (amsgrad) state.max_exp_avg_sq(settle(state.max_exp_avg_sq(), flat.max_exp_avg_sq, members.indices[i]));
      state.step(state.step() + 1);
    }
    if (in_one_pass(*group, members.parameters, members.states)) {
      batch.add(weights, group->gradients()->main_grad().local_buffer(), flat.exp_avg, flat.exp_avg_sq,
                amsgrad ? flat.max_exp_avg_sq : at::Tensor(), members.states[0]->step());
      continue;
    }
    for (size_t i = 0; i < members.states.size(); ++i) {
      auto& state = *members.states[i];
      batch.add(group->rows_of(weights, members.indices[i]), members.parameters[i].grad(), state.exp_avg(),
                state.exp_avg_sq(), state.max_exp_avg_sq(), state.step());
    }
  }
}

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    c10::AutoGradMode enable(true);
    loss = closure();
  }
  for (auto& group : param_groups())
    for (auto& p : group.params())
      if (p.grad().defined())
        detail::refuse_unreduced(p.grad(), detail::registry::owner(p.unsafeGetTensorImpl()).get(), "optim::AdamW");
  detail::Unhooked unhooked;
  c10::NoGradGuard no_grad;
  for (auto& group : param_groups()) {
    Batch batch;
    collect(group, batch);
    batch.run(static_cast<const AdamWOptions&>(group.options()));
  }
  return loss;
}

}  // namespace fsdp::optim
