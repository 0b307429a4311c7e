#include <fsdp/fully_shard.h>

#include <cmath>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <fsdp/buffer_split.h>
#include <fsdp/hooks.h>

#include "runtime/ownership.h"
#include "runtime/registry.h"
#include "runtime/shard_request.h"
#include "runtime/unit.h"

namespace fsdp {
namespace detail {

void link_operator_hooks();

namespace {

/// Units by module. A unit is owned by its module where that is Hooked, else by its parameters' gradient hooks, else
/// (no parameters) by this table until the module is gone.
struct Modules {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, std::weak_ptr<Unit>> units;
  std::vector<std::shared_ptr<Unit>> ownerless;
};
Modules& modules() {
  static auto* m = new Modules;  // never destroyed: modules of static storage duration may outlive it
  return *m;
}

/// Runs after a parameter's gradient is complete in one backward. A hook the user had set runs first.
struct GradientHook final : torch::autograd::PostAccumulateGradHook {
  std::weak_ptr<Unit> unit;
  std::shared_ptr<Unit> owned;  // set where the parameters own the unit
  size_t group, parameter;
  std::unique_ptr<PostAccumulateGradHook> previous;

  void operator()(const torch::autograd::Variable& variable) override {
    if (previous) (*previous)(variable);
    if (auto u = unit.lock()) u->on_gradient(group, parameter);
  }
};

Placement for_buffers(const Placement& p) { return std::holds_alternative<Shard>(p) ? Placement(RowAtomic{}) : p; }

std::vector<Placement> for_buffers(const std::vector<Placement>& placements) {
  std::vector<Placement> result;
  for (const auto& p : placements) result.push_back(for_buffers(p));
  return result;
}

/// Divides each group among a few where that saves padding: each gets a buffer of its own.
std::vector<std::vector<ParameterInfo>> divided(std::vector<std::vector<ParameterInfo>> groups,
                                                const Placements& placements, const DeviceMesh& mesh,
                                                ShardLayout layout) {
  int64_t block = 0;  // nothing is cut at rows
  for (const auto* sequence : {&placements.parameter, &placements.gradient, &placements.optimizer})
    for (const auto& p : *sequence) {
      if (std::holds_alternative<TensorAtomic>(p)) return groups;
      if (const auto* blocks = std::get_if<BlockAtomic>(&p)) block = blocks->block_size;
      if (is_sharded(p)) block = std::max<int64_t>(block, 1);
    }
  if (block == 0 || layout != ShardLayout::kPadded) return groups;
  std::vector<std::vector<ParameterInfo>> result;
  for (auto& group : groups) {
    std::vector<Shape> shapes;
    for (const auto& p : group) shapes.push_back(ParameterShape(p.tensor).planned);
    for (const auto& buffer : plan_buffers(shapes, mesh.size(), {.block_size = block}).buffers) {
      auto& part = result.emplace_back();
      for (auto i : buffer.tensors) part.push_back(group[static_cast<size_t>(i)]);
    }
  }
  return result;
}

bool has_no_forward(const torch::nn::Module& m) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&m) || dynamic_cast<const torch::nn::ModuleDictImpl*>(&m) ||
         dynamic_cast<const torch::nn::ParameterListImpl*>(&m) || dynamic_cast<const torch::nn::ParameterDictImpl*>(&m);
}

void check_owners(const OwnerMap& owners, const std::vector<ParameterInfo>& group, const DeviceMesh& mesh,
                  std::vector<int64_t>& result) {
  if (mesh.ndim() != 1)
    throw ValueError(fmt::format(
        "TensorAtomic places whole tensors on the ranks of one axis; the unit has {} data-parallel axes", mesh.ndim()));
  for (const auto& p : group) {
    auto it = owners.find(p.tensor.unsafeGetTensorImpl());
    if (it == owners.end())
      throw ValueError(
          fmt::format("parameter '{}' has no entry in the context's parameter_to_owner, which TensorAtomic needs",
                      p.names.front()));
    if (it->second < 0 || it->second >= mesh.size())
      throw ValueError(fmt::format("parameter '{}': owner {} is out of range; the axis has {} ranks", p.names.front(),
                                   it->second, mesh.size()));
    result.push_back(it->second);
  }
}

/// 64-bit FNV-1a over words: ranks that initialised differently are told apart, and nothing more is asked of it.
uint64_t hash_values(const at::Tensor& tensor) {
  auto t = tensor.detach().contiguous().cpu();
  const auto* bytes = static_cast<const unsigned char*>(t.data_ptr());
  const size_t n = t.nbytes();
  uint64_t h = 1469598103934665603ull;
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    h = (h ^ word) * 1099511628211ull;
    h ^= h >> 29;
  }
  for (; i < n; ++i) h = (h ^ bytes[i]) * 1099511628211ull;
  return h;
}

void initialise_meta(Group& group, const std::vector<ParameterInfo>& parameters, const ParameterInit& init,
                     std::string& signature) {
  if (!init) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    if (!p.tensor.is_meta()) continue;
    // One whole tensor at a time, on every rank: values cannot depend on where the cuts are.
    auto full = at::zeros(p.tensor.sizes(), group.main_weight().local_buffer().options());
    init(p.names.front(), full);
    signature += fmt::format("  parameter '{}' initialised to {:016x}\n", p.names.front(), hash_values(full));
    group.initialise(i, full);
  }
}

void check_arguments(const torch::nn::Module& module, const DeviceMesh& mesh, const MixedPrecisionPolicy& precision,
                     double grad_scale, const SchedulePolicy& schedule, const ContextState& context) {
  if (auto* unit = get_fsdp_module(module))
    throw ValueError(
        fmt::format("fully_shard: module '{}' is a unit already ('{}')", module.name(), unit_of(*unit).display_name()));
  precision.validate();
  schedule.validate();
  if (!(grad_scale > 0) || !std::isfinite(grad_scale))
    throw ValueError(fmt::format("fully_shard: expected a positive, finite grad_scale, got {}", grad_scale));
  if (mesh.device() != context.device)
    throw ValueError(fmt::format("fully_shard: the mesh is on device {}, the context on {}", mesh.device().str(),
                                 context.device.str()));
  if (has_no_forward(module))
    throw ValueError(
        fmt::format("fully_shard: '{}' is a container without a forward of its own, so nothing would gather its "
                    "parameters; shard its children, or the module that uses them",
                    module.name()));
  const bool hooked = dynamic_cast<const HookSlot*>(&module) != nullptr;
  if (schedule.hooks == ExecutionHooks::kModule && !hooked)
    throw ValueError(
        fmt::format("fully_shard: '{}' has no module hooks; declare it with FSDP_MODULE, or use "
                    "ExecutionHooks::kAuto or kOperator",
                    module.name()));
}

}  // namespace

FsdpModule& shard_module(torch::nn::Module& module, const DeviceMesh& mesh, const Placements& placements,
                         ShardRequest request, const std::shared_ptr<ContextState>& context) {
  link_operator_hooks();
  Unhooked unhooked;
  c10::NoGradGuard no_grad;
  const auto& precision = request.precision;
  const double grad_scale = request.grad_scale;

  // ---- everything that can be refused, before anything changes
  if (context->finalized) throw StateError("fully_shard: the context is finalized; no unit can join it any more");
  placements.validate();
  check_arguments(module, mesh, precision, grad_scale, request.schedule, *context);
  auto dp_mesh = mesh.sub(placements.dp_axes);
  auto ownership = collect_ownership(module, *context, request.ignored);
  const auto groups = divided(std::move(ownership.groups), placements, dp_mesh, request.layout);

  const bool one_stream = !context->policy.overlap_allgather_reduction;
  auto unit = std::make_shared<Unit>(context, module, request.schedule);
  unit->casts = request.casts;
  unit->root_keeps_weights = request.root_keeps_weights;
  unit->mesh = dp_mesh;
  std::string signature;
  for (const auto& parameters : groups) {
    GroupOptions options{.mesh = dp_mesh,
                         .parameter = for_buffers(placements.parameter),
                         .gradient = for_buffers(placements.gradient),
                         .optimizer = for_buffers(placements.optimizer),
                         .precision = precision,
                         .grad_scale = grad_scale,
                         .layout = request.layout,
                         .reduction = context->policy.grad_reduction,
                         .reduce_channel = one_stream ? Channel::kGather : Channel::kReduce,
                         .pool = context->pool};
    for (const auto* sequence : {&options.parameter, &options.gradient, &options.optimizer}) {
      const bool whole = std::any_of(sequence->begin(), sequence->end(),
                                     [](const auto& p) { return std::holds_alternative<TensorAtomic>(p); });
      if (whole && options.owners.empty()) check_owners(context->owners, parameters, dp_mesh, options.owners);
    }
    auto group = std::make_unique<Group>(options, parameters);
    group->load_initial_values(parameters);
    for (const auto& p : parameters)
      signature += fmt::format("  parameter '{}' [{}] {} {}{}\n", p.names.front(), fmt::join(p.tensor.sizes(), ", "),
                               c10::toString(p.tensor.scalar_type()), p.tensor.requires_grad() ? "trainable" : "frozen",
                               p.tensor.is_meta() ? "" : fmt::format(" initialised to {:016x}", hash_values(p.tensor)));
    initialise_meta(*group, parameters, request.init, signature);
    signature += fmt::format("  placements {} {} {}, grad_scale {}, {} {}\n", to_string(std::span(options.parameter)),
                             to_string(std::span(options.gradient)), to_string(std::span(options.optimizer)),
                             grad_scale, c10::toString(group->main_dtype()), c10::toString(group->compute_dtype()));
    unit->groups.push_back(std::move(group));
  }
  unit->signature = std::move(signature);
  for (const auto& lender : ownership.lenders) unit->lenders.push_back(lender);

  // ---- commit: allocation apart, nothing below fails
  auto* slot = dynamic_cast<HookSlot*>(&module);
  for (size_t g = 0; g < unit->groups.size(); ++g) {
    auto& group = *unit->groups[g];
    unit->group_views.push_back(&group.view());
    if (auto* gradients = group.gradients()) gradients->register_unit(unit);
    registry::add_storage(group.main_weight().local_buffer().storage().unsafeGetStorageImpl(), unit,
                          Managed::Kind::kMainStorage);
    registry::add_storage(group.full_storage().unsafeGetStorageImpl(), unit, Managed::Kind::kFullStorage);
    for (size_t i = 0; i < group.handles().size(); ++i) {
      const auto& tensor = groups[g][i].tensor;
      registry::add_handle(tensor.unsafeGetTensorImpl(), unit);
      auto hook = std::make_unique<GradientHook>();
      hook->unit = unit;
      if (!slot) hook->owned = unit;
      hook->group = g;
      hook->parameter = i;
      torch::autograd::impl::materialize_autograd_meta(tensor);  // a frozen parameter may have none
      hook->previous = std::move(torch::autograd::impl::post_acc_grad_hooks(tensor));
      torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::move(hook));
      if (tensor.requires_grad()) {
        // A use of the parameter whose output was not hooked: the gradient at rest still has to make way.
        tensor.register_hook([weak = std::weak_ptr<Unit>(unit)](const at::Tensor&) {
          if (auto u = weak.lock()) u->begin_backward();
        });
      }
    }
    group.take_over();
  }
  if (slot) slot->attach(unit);
  {
    auto& table = modules();
    std::lock_guard lock(table.mutex);
    std::erase_if(table.units, [](const auto& entry) { return entry.second.expired(); });
    std::erase_if(table.ownerless, [](const auto& u) { return u->module_alive.expired(); });
    table.units[&module] = unit;
    if (!slot && unit->groups.empty()) table.ownerless.push_back(unit);
  }
  context->registered.push_back(unit.get());
  return *unit;
}

}  // namespace detail

FsdpModule& fully_shard(torch::nn::Module& module, const DeviceMesh& mesh, const Placements& placements,
                        MixedPrecisionPolicy precision, double grad_scale, SchedulePolicy schedule, ShardLayout layout,
                        ParameterInit init) {
  auto* active = detail::active_context();
  if (!active)
    throw StateError(
        "fully_shard: no context is active on this thread; open auto scope = fsdp::fully_shard_context(ctx)");
  return detail::shard_module(module, mesh, placements,
                              {.precision = precision,
                               .grad_scale = grad_scale,
                               .schedule = schedule,
                               .layout = layout,
                               .init = std::move(init)},
                              active->state());
}

FsdpModule* get_fsdp_module(const torch::nn::Module& module) {
  using namespace detail;
  if (const auto* slot = dynamic_cast<const HookSlot*>(&module)) return slot->unit().get();
  auto& table = modules();
  std::lock_guard lock(table.mutex);
  auto it = table.units.find(&module);
  if (it == table.units.end()) return nullptr;
  auto unit = it->second.lock();
  // Another module may live at the address now.
  if (!unit || unit->module_alive.lock().get() != module.weak_from_this().lock().get()) return nullptr;
  return unit.get();
}

}  // namespace fsdp
