#include <cmath>

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <fsdp/mixed_precision.h>
#include <fsdp/schedule_policy.h>

namespace fsdp {

void MixedPrecisionPolicy::validate() const {
  auto check = [](const char* field, const std::optional<at::ScalarType>& type) {
    if (type && *type != at::kFloat && *type != at::kDouble && *type != at::kHalf && *type != at::kBFloat16)
      throw ValueError(fmt::format("MixedPrecisionPolicy::{}: expected float64, float32, bfloat16 or float16, got {}",
                                   field, c10::toString(*type)));
  };
  check("main_params_dtype", main_params_dtype);
  check("main_grads_dtype", main_grads_dtype);
  check("grad_comm_dtype", grad_comm_dtype);
  check("param_dtype", param_dtype);
  if (param_format != ParamFormat::kNative)
    throw ValueError(
        "MixedPrecisionPolicy::param_format: MXFP8 compute weights are not available in this version; use kNative");
}

void SchedulePolicy::validate() const {
  auto check = [](const char* field, const std::optional<int64_t>& value, int64_t least) {
    if (value && *value < least)
      throw ValueError(fmt::format("SchedulePolicy::{}: expected at least {}, got {}", field, least, *value));
  };
  check("forward_prefetch_size", forward_prefetch_size, 0);
  check("backward_prefetch_size", backward_prefetch_size, 0);
  check("grad_accumulation_count", grad_accumulation_count, 1);
  if (unshard_all_planes_in_backward)
    throw ValueError(
        "SchedulePolicy::unshard_all_planes_in_backward is for MXFP8 weights, which are not available in this "
        "version");
}

}  // namespace fsdp
