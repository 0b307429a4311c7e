#pragma once

#include <filesystem>

#include <fsdp/checkpoint.h>

#include "checkpoint/collective_call.h"
#include "checkpoint/manifest.h"

namespace fsdp::detail {

/// What is to be restored, and from where.
struct Stored {
  Manifest manifest;
  std::filesystem::path folder;  // of the pieces' files
  std::string name;              // in errors
  bool convert = false;          // dtypes may differ
};

/// Puts stored values into the module and (where there is one) the optimizer. An error leaves both as they were.
CheckpointReport restore(CollectiveCall& call, const Stored& stored, torch::nn::Module& module,
                         torch::optim::Optimizer* optimizer, const CheckpointOptions& options);

}  // namespace fsdp::detail
