#pragma once

#include <string>
#include <string_view>

namespace fsdp::json {

/// A JSON string, with its quotes.
std::string quoted(std::string_view text);

}  // namespace fsdp::json
