#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <fsdp/distributed/world.h>

/// Saving and loading of sharded training: every rank writes and reads its own rows only, and what was saved fits any
/// number of ranks, mesh, placements and layout. All functions are collective over the world of the module's units, and
/// called between backward and forward, from the rank's thread. An
/// error is thrown on all ranks alike, with "rank N: " before what only one met. All ranks see one file system. No rank
/// waits for another longer than WorldOptions::timeout, which must cover the writing of the largest part.
namespace fsdp {

struct CheckpointOptions {
  /// The name under which a parameter or buffer is stored, from its FQN in the module. For modules in which ranks hold
  /// different tensors under one FQN (expert or tensor parallelism, pipeline stages), and for files with other names.
  /// Default: the FQN.
  std::function<std::string(const std::string& fqn)> name = {};
  /// Loading: what is missing or unexpected is an error.
  bool strict = true;
  /// Saving: the program's own notes (the step, the place in the data), kept with the checkpoint; rank 0's count.
  std::map<std::string, std::string> notes = {};
  /// The job, for a module without units (a pipeline stage that is not sharded). Null: such a module is this process's
  /// own.
  std::shared_ptr<World> world = nullptr;
};

/// The same on all ranks. What concerns the optimizer is named "optimizer/NAME".
struct CheckpointReport {
  std::vector<std::string> missing;          ///< in the module or the optimizer, but not stored; left as they were
  std::vector<std::string> unexpected;       ///< stored, but not in the module or the optimizer
  std::map<std::string, std::string> notes;  ///< as saved
};

/// Writes folder `dir`: parameters in the optimizer's dtype, buffers, the optimizer's state and options. `dir` appears
/// under its name when all of it is on the disk; until then it is `dir`.incomplete, which the next save replaces. A
/// tensor with several names is stored once. Of replicas (ddp, hsdp) the first is written. Tensors that no unit owns
/// are written by the lowest rank that has them: parameters must be equal on all ranks, of buffers that rank's count.
/// Changes neither module nor optimizer. Gradients, random states and learning-rate schedulers are not saved, and of
/// several optimizers only the one given. CheckpointError: `dir` exists; a write failed; units or ranks hold different
/// values under one name; optimizer state that does not go by rows. StateError: in the middle of a forward or backward,
/// inside FullParameters, a parameter without values. ValueError: the optimizer trains a parameter that is not the
/// module's. CommError: a rank is gone.
void save_checkpoint(const std::filesystem::path& dir, torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                     const CheckpointOptions& options = {});
/// Without an optimizer's state.
void save_checkpoint(const std::filesystem::path& dir, torch::nn::Module& module,
                     const CheckpointOptions& options = {});

/// Reads this rank's rows of everything in `dir`. Options (learning rate, ...) and state come back per parameter name,
/// whatever the order of groups; a parameter that was saved without state has none afterwards. Compute weights follow.
/// Everything is read and checked first, into memory as large as this rank's share: an error leaves module and
/// optimizer as they were.
/// CheckpointError: no such, an incomplete or a damaged checkpoint; another shape or dtype; with `strict` missing or
/// unexpected names; all of these in one message. Also unequal values for names that are tied in this module, and
/// options or state of another kind of optimizer (told by their names). Damage is found where a file is missing, cut,
/// of another save or unreadable; flipped bits in values are not. StateError and ValueError as save_checkpoint.
CheckpointReport load_checkpoint(const std::filesystem::path& dir, torch::nn::Module& module,
                                 torch::optim::Optimizer& optimizer, const CheckpointOptions& options = {});
/// The module only; an optimizer's state in `dir` is left alone.
CheckpointReport load_checkpoint(const std::filesystem::path& dir, torch::nn::Module& module,
                                 const CheckpointOptions& options = {});

/// Writes the whole module as one safetensors file, each rank its rows, in place of any file of that name once all of
/// it is on the disk. Parameters in the optimizer's dtype, and buffers. A tensor with several names is stored under the
/// first; the file's metadata maps each further name to it, and options.notes go there too (ValueError for a note named
/// like a tensor). Errors as save_checkpoint.
void save_safetensors(const std::filesystem::path& path, torch::nn::Module& module,
                      const CheckpointOptions& options = {});
/// Reads this rank's rows from a safetensors file, or from all *.safetensors files of a folder, converting to the
/// module's dtypes. Errors as load_checkpoint, but dtypes may differ.
CheckpointReport load_safetensors(const std::filesystem::path& path, torch::nn::Module& module,
                                  const CheckpointOptions& options = {});

}  // namespace fsdp
