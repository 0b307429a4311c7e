#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <fsdp/collective_log.h>

#include "distributed/failures.h"

namespace fsdp {

struct CollectiveLog::State {
  mutable std::mutex mutex;
  std::vector<CollectiveRecord> records;
};

namespace detail {

/// What the communicators of one rank's world report to: the logs that live now, and the failures. Thread safe.
class CommTrace {
 public:
  explicit CommTrace(int64_t rank);

  void record(CollectiveRecord record);
  void attach(std::shared_ptr<CollectiveLog::State> log);
  void detach(const CollectiveLog::State* log);
  /// FSDP_DEBUG=1: compare every collective across ranks before it runs.
  bool checks_ranks() const { return checks_ranks_; }
  const std::shared_ptr<JobFailures>& failures() const { return failures_; }

 private:
  const std::shared_ptr<JobFailures> failures_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<CollectiveLog::State>> logs_;
  bool checks_ranks_;
};

}  // namespace detail
}  // namespace fsdp
