#pragma once

#include <exception>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <fsdp/distributed/world.h>

namespace fsdp::detail {

/// One collective call, in steps that all ranks take together: what fails on one rank fails on all of them, with the
/// same error, before any goes on to the next step.
class CollectiveCall {
 public:
  /// Without a world, this process is alone. StateError in a simulated world. `name` is what errors call it.
  CollectiveCall(std::shared_ptr<World> world, const char* name);

  int64_t rank() const { return world_ ? world_->rank() : 0; }
  int64_t size() const { return world_ ? world_->size() : 1; }
  bool first() const { return rank() == 0; }

  /// `work` does not communicate.
  template <class Work>
  void step(Work&& work) {
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    agree(error);
  }

  /// Every rank's list, in rank order; only one where all have the same.
  std::vector<std::vector<std::string>> exchange(const std::vector<std::string>& mine);
  /// What is in the list of any rank.
  std::set<std::string> union_of(const std::vector<std::string>& mine);
  /// ValueError on all ranks when they have not the same `value`.
  void require_same(const std::string& value, const char* what);

 private:
  void agree(const std::exception_ptr& error);

  std::shared_ptr<World> world_;
  const char* name_;
};

}  // namespace fsdp::detail
