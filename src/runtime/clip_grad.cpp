#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_set>

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <fsdp/optim.h>

#include "runtime/registry.h"
#include "runtime/unit.h"

namespace fsdp {
namespace {

using detail::Unit;

/// Gradients whose elements are spread over the same mesh in the same way.
struct Share {
  std::optional<DeviceMesh> mesh;  // none: ordinary parameters, or replicated ones
  std::vector<int64_t> sharded_axes;
  std::vector<at::Tensor> gradients;
};

/// The optimizer placement of a unit's parameter says which axes its gradient is spread over.
std::vector<int64_t> sharded_axes(const Unit& unit, const c10::TensorImpl* handle) {
  std::vector<int64_t> axes;
  const auto* group = unit.find(handle).group;
  const auto& placements = group->main_weight().placements();
  for (size_t i = 0; i < placements.size(); ++i)
    if (is_sharded(placements[i]) && group->mesh().size(static_cast<int64_t>(i)) > 1)
      axes.push_back(static_cast<int64_t>(i));
  return axes;
}

std::vector<Share> share_out(at::TensorList parameters) {
  std::vector<Share> shares;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& p : parameters) {
    if (!p.defined() || !seen.insert(p.unsafeGetTensorImpl()).second) continue;
    auto unit = detail::registry::owner(p.unsafeGetTensorImpl());
    const auto gradient = p.grad();
    if (gradient.defined()) detail::refuse_unreduced(gradient, unit.get(), "clip_grad_norm_");
    std::vector<int64_t> axes;
    if (unit) axes = sharded_axes(*unit, p.unsafeGetTensorImpl());
    std::optional<DeviceMesh> mesh;
    if (!axes.empty()) mesh = unit->mesh;
    auto it = std::find_if(shares.begin(), shares.end(), [&](const Share& s) {
      return s.mesh.has_value() == mesh.has_value() && (!mesh || *s.mesh == *mesh) && s.sharded_axes == axes;
    });
    // A share exists on every rank that lists the parameter, with or without a gradient: the ranks' collectives match.
    if (it == shares.end()) it = shares.insert(shares.end(), Share{mesh, axes, {}});
    if (gradient.defined()) it->gradients.push_back(gradient.is_sparse() ? gradient._values() : gradient);
  }
  return shares;
}

}  // namespace

at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm, double norm_type, bool error_if_nonfinite) {
  if (!(max_norm > 0)) throw ValueError(fmt::format("clip_grad_norm_: expected a positive max_norm, got {}", max_norm));
  if (!(norm_type > 0))
    throw ValueError(fmt::format("clip_grad_norm_: expected a positive norm_type, got {}", norm_type));
  detail::Unhooked unhooked;
  c10::NoGradGuard no_grad;
  auto shares = share_out(parameters);
  const bool maximum = std::isinf(norm_type);
  c10::Device device = parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().device();
  auto result_type = at::kFloat;
  // fp64 throughout: the sum over many shards must not depend on how they were cut.
  auto total = at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(device));
  for (auto& share : shares) {
    auto mine = at::zeros({1}, total.options());
    for (const auto& g : share.gradients) {
      if (g.scalar_type() == at::kDouble) result_type = at::kDouble;
      if (g.numel() == 0) continue;  // this rank owns no row of it
      auto norm = at::linalg_vector_norm(g, norm_type, std::nullopt, false, at::kDouble);
      if (maximum)
        mine = mine.maximum(norm);
      else
        mine.add_(norm.pow(norm_type));
    }
    for (auto axis : share.sharded_axes)
      share.mesh->communicator(axis, Channel::kReduce)
          .all_reduce(mine, maximum ? ReduceOp::kMax : ReduceOp::kSum)
          .wait();
    total = maximum ? total.maximum(mine) : total.add_(mine);
  }
  auto norm = (maximum ? total : total.pow(1.0 / norm_type)).squeeze(0);
  if (error_if_nonfinite && !std::isfinite(norm.item<double>()))
    throw StateError(
        fmt::format("clip_grad_norm_: the norm of the gradients is {}; no gradient was scaled", norm.item<double>()));
  auto factor = (max_norm / (norm + 1e-6)).clamp_max(1.0);
  for (auto& share : shares)
    for (auto& g : share.gradients) g.mul_(factor);
  return norm.to(result_type);
}

namespace detail {

CastGradients::CastGradients(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  for (const auto& group : groups)
    for (const auto& p : group.params())
      if (p.grad().defined()) refuse_unreduced(p.grad(), registry::owner(p.unsafeGetTensorImpl()).get(), "step");
  for (const auto& group : groups)
    for (const auto& p : group.params()) {
      const auto gradient = p.grad();
      if (!gradient.defined() || gradient.scalar_type() == p.scalar_type()) continue;
      kept_.emplace_back(p, gradient);
      p.mutable_grad() = gradient.to(p.scalar_type());
    }
}

CastGradients::~CastGradients() {
  for (auto& [parameter, gradient] : kept_) parameter.mutable_grad() = gradient;
}

}  // namespace detail
}  // namespace fsdp
