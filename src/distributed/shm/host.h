#pragma once

#include <memory>
#include <string>

#include "distributed/backend.h"
#include "distributed/shm/segment.h"

namespace fsdp::detail::shm {

/// The segment of a communicator, or why it has none: equal on all its ranks.
struct Joined {
  std::shared_ptr<Segment> segment;
  std::string problem;
  bool one_host = true;  // false: the problem is that ranks do not share a host
};

/// Rank 0 makes the segment, the others map it, all hear of everybody's success. Collective. Throws when a rank does
/// not answer within the timeout.
Joined join(const CommSetup& setup);

/// Cores that the segment's ranks may run on, all together.
int64_t cores_of(const Segment& segment);

}  // namespace fsdp::detail::shm
