#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/distributed/world.h>

namespace fsdp {

/// One data collective as this rank submitted it.
struct CollectiveRecord {
  std::string axes;       ///< mesh axis name
  std::string operation;  ///< all_gather, reduce_scatter, all_reduce, broadcast, all_to_all
  int64_t elements = 0;   ///< of the whole buffer: gather output, scatter input, reduced buffer; the larger of
                          ///< all_to_all's two
  std::string unit;       ///< FSDP unit that issued it; "" for none or the root
  at::ScalarType dtype = at::kFloat;
};

/// Records this rank's data collectives in order of submission while it lives. Barriers, rendezvous
/// and cross-rank checks are not data; nor is anything on an axis of one rank, where nothing is
/// communicated. Several logs may live at once. Keeps what it needs of the world alive.
class CollectiveLog {
 public:
  explicit CollectiveLog(World& world);
  ~CollectiveLog();
  CollectiveLog(const CollectiveLog&) = delete;
  CollectiveLog& operator=(const CollectiveLog&) = delete;

  std::vector<CollectiveRecord> records() const;
  void clear();

  struct State;

 private:
  std::shared_ptr<State> state_;
  std::shared_ptr<detail::CommTrace> trace_;
};

}  // namespace fsdp
