#include <fsdp/checkpoint.h>

#include "checkpoint/folder.h"
#include "checkpoint/module_state.h"
#include "checkpoint/restore.h"

namespace fsdp {
namespace {

CheckpointReport load(const std::filesystem::path& dir, torch::nn::Module& module, torch::optim::Optimizer* optimizer,
                      const CheckpointOptions& options) {
  detail::CollectiveCall call(detail::begin_collective(module, options.world), "load_checkpoint");
  detail::Stored stored;
  call.step([&] {
    const detail::CheckpointFolder folder(dir);
    stored.manifest = folder.open();
    stored.folder = folder.path();
    stored.name = folder.path().string();
    if (call.first()) folder.check_files(stored.manifest);
  });
  call.require_same(stored.name, "path");
  return detail::restore(call, stored, module, optimizer, options);
}

}  // namespace

CheckpointReport load_checkpoint(const std::filesystem::path& dir, torch::nn::Module& module,
                                 torch::optim::Optimizer& optimizer, const CheckpointOptions& options) {
  return load(dir, module, &optimizer, options);
}

CheckpointReport load_checkpoint(const std::filesystem::path& dir, torch::nn::Module& module,
                                 const CheckpointOptions& options) {
  return load(dir, module, nullptr, options);
}

}  // namespace fsdp
