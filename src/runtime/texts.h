#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <fsdp/distributed/communicator.h>

namespace fsdp::detail {

/// Every member's text, in rank order. Collective; `purpose` is what errors call it.
std::vector<std::string> exchange_texts(Communicator& comm, const std::string& mine, std::string_view purpose = {});

/// Whether all members have the same text: one small collective, of which all have the same answer.
bool same_everywhere(Communicator& comm, const std::string& mine, std::string_view purpose = {});

}  // namespace fsdp::detail
