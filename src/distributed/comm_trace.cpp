#include "distributed/comm_trace.h"

#include <cstdlib>
#include <string_view>

namespace fsdp {
namespace detail {

CommTrace::CommTrace(int64_t rank) : failures_(std::make_shared<JobFailures>(rank)) {
  const char* debug = std::getenv("FSDP_DEBUG");
  checks_ranks_ = debug && std::string_view(debug) != "" && std::string_view(debug) != "0";
}

void CommTrace::record(CollectiveRecord record) {
  std::lock_guard lock(mutex_);
  for (const auto& log : logs_) {
    std::lock_guard log_lock(log->mutex);
    log->records.push_back(record);
  }
}

void CommTrace::attach(std::shared_ptr<CollectiveLog::State> log) {
  std::lock_guard lock(mutex_);
  logs_.push_back(std::move(log));
}

void CommTrace::detach(const CollectiveLog::State* log) {
  std::lock_guard lock(mutex_);
  std::erase_if(logs_, [&](const auto& l) { return l.get() == log; });
}

}  // namespace detail

CollectiveLog::CollectiveLog(World& world) : state_(std::make_shared<State>()), trace_(world.trace()) {
  trace_->attach(state_);
}

CollectiveLog::~CollectiveLog() { trace_->detach(state_.get()); }

std::vector<CollectiveRecord> CollectiveLog::records() const {
  std::lock_guard lock(state_->mutex);
  return state_->records;
}

void CollectiveLog::clear() {
  std::lock_guard lock(state_->mutex);
  state_->records.clear();
}

}  // namespace fsdp
