#pragma once

#include <cstddef>

namespace fsdp::detail::shm {

/// Nothing when there is nothing to move or it is there already.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes);

/// The same past the caches: for what this core does not read again soon. A slot's lines lie in the peers' caches, and
/// storing to such a line first takes it from them (3-5 GB/s between the cores of the machine that this was written
/// on); streaming stores do not (22 GB/s), and the peers read as fast. What was stored is visible before anything that
/// is stored after the call.
void stream_bytes(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace fsdp::detail::shm
