#include "distributed/backend.h"

namespace fsdp::detail {

std::shared_ptr<Communicator> make_nccl_communicator(CommSetup) {
  throw ValueError("backend 'nccl' is not in this build: use 'gloo' on CPU devices");
}

}  // namespace fsdp::detail
