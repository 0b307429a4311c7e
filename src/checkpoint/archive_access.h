#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

/// LibTorch's archives give no way to list what was written, or to read it back, except through a zip file that copies
/// every byte (and, for a view, the whole storage). Both keep their contents in a module, which this reaches.
namespace fsdp::detail {

torch::jit::Module& module_of(torch::serialize::OutputArchive& archive);
torch::jit::Module& module_of(torch::serialize::InputArchive& archive);

/// What was written to `out`, to be read; they share the contents.
inline torch::serialize::InputArchive reader_of(torch::serialize::OutputArchive& out) {
  torch::serialize::InputArchive in;
  module_of(in) = module_of(out);
  return in;
}

}  // namespace fsdp::detail
