#pragma once

#include <functional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/models.h"

namespace fsdp::testing {

/// Runs `body(mesh)` on ranks as threads over a mesh of the given shape, with axes "dp" or "outer", "inner", ...
inline void on_mesh(std::vector<int64_t> shape, const std::function<void(const DeviceMesh&)>& body,
                    int64_t timeout_ms = 20'000) {
  int64_t ranks = 1;
  for (auto s : shape) ranks *= s;
  std::vector<std::string> names = shape.size() == 1   ? std::vector<std::string>{"dp"}
                                   : shape.size() == 2 ? std::vector<std::string>{"outer", "inner"}
                                                       : std::vector<std::string>{"a", "b", "c"};
  run_threads(
      ranks, [&](std::shared_ptr<World> world) { body(init_device_mesh(world, shape, names)); },
      short_timeout(timeout_ms));
}

/// The text of the exception of type E that `f` throws; a test failure otherwise.
template <class E, class F>
std::string thrown(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "another exception: " << e.what();
    return "";
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

struct NamedPlacements {
  std::string name;
  Placements placements;
};
inline std::vector<NamedPlacements> one_axis() {
  return {{"ddp", ddp("dp")}, {"zero1", zero1("dp")}, {"zero2", zero2("dp")}, {"zero3", zero3("dp")}};
}
inline std::vector<NamedPlacements> two_axes() {
  return {{"hsdp", hsdp("outer", "inner")}, {"hfsdp", hfsdp("outer", "inner")}};
}

/// The same, sharded by rows, blocks or whole tensors.
inline Placements with_kind(Placements p, const Placement& kind) {
  for (auto* sequence : {&p.parameter, &p.gradient, &p.optimizer})
    for (auto& one : *sequence)
      if (is_sharded(one)) one = kind;
  return p;
}
/// Owners for TensorAtomic: all ranks but the last, in turn.
inline OwnerMap owners_in_turn(torch::nn::Module& module, int64_t ranks) {
  OwnerMap owners;
  int64_t next = 0;
  for (auto& p : fsdp::parameters(module)) owners[p.unsafeGetTensorImpl()] = next++ % std::max<int64_t>(1, ranks - 1);
  return owners;
}

inline void shard_one(torch::nn::Module& module, FsdpContext& ctx, const DeviceMesh& mesh, const Placements& placements,
                      MixedPrecisionPolicy precision = {}, double grad_scale = 1.0, SchedulePolicy schedule = {},
                      ShardLayout layout = ShardLayout::kPadded) {
  auto scope = fully_shard_context(ctx);
  fully_shard(module, mesh, placements, precision, grad_scale, schedule, layout);
}

/// Largest distance of a tensor's elements from `expected`; 0 for an empty one.
inline double off_by(const torch::Tensor& t, double expected) {
  if (!t.defined()) return INFINITY;
  return t.numel() == 0 ? 0.0 : (t.to(torch::kDouble) - expected).abs().max().item<double>();
}

/// Bytes of full weights gathered anywhere under a module.
inline int64_t gathered_bytes(torch::nn::Module& module) {
  int64_t bytes = 0;
  for (const auto& m : module.modules())
    if (auto* unit = get_fsdp_module(*m))
      for (const auto* group : unit->parameter_groups()) bytes += group->full_bytes();
  return bytes;
}

inline void expect_at_rest(torch::nn::Module& module) {
  EXPECT_EQ(gathered_bytes(module), 0);
  for (const auto& m : module.modules())
    if (auto* unit = get_fsdp_module(*m)) {
      EXPECT_EQ(unit->phase(), FsdpModule::Phase::kResting) << unit->name();
    }
}

}  // namespace fsdp::testing
