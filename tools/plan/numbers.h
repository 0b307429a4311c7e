#pragma once

#include <cstdint>
#include <string>

namespace fsdp::plan {

/// 70,553,706,496
std::string grouped(int64_t n);
/// "3.28 GiB"
std::string sized(int64_t bytes);
/// "1 tensor", "2 tensors"
std::string counted(int64_t n, const std::string& thing);

}  // namespace fsdp::plan
