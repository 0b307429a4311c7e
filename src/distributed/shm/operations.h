#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include <fsdp/distributed/communicator.h>
#include <fsdp/placement.h>

#include "distributed/shm/rounds.h"

namespace fsdp::detail::shm {

/// Place in a communicator.
struct Place {
  int64_t rank, ranks;
};

// Arguments as those of Communicator's do_ functions; counts in elements.
std::unique_ptr<Operation> all_gather(Place, const at::Tensor& out, const at::Tensor& in, Counts, const OpInfo&);
std::unique_ptr<Operation> reduce_scatter(Place, const at::Tensor& out, const at::Tensor& in, double scale, Counts,
                                          const OpInfo&);
std::unique_ptr<Operation> all_reduce(Place, const at::Tensor& tensor, ReduceOp, double scale, const OpInfo&);
std::unique_ptr<Operation> broadcast(Place, const at::Tensor& tensor, int64_t root, const OpInfo&);
std::unique_ptr<Operation> all_to_all(Place, const at::Tensor& out, const at::Tensor& in, Counts out_counts,
                                      Counts in_counts, const OpInfo&);
std::unique_ptr<Operation> barrier(const OpInfo&);

}  // namespace fsdp::detail::shm
