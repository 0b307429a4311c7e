#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

/// LibTorch's archives give no way to list what was written, or to read it back, except through a zip file that copies
/// every byte (and, for a view, the whole storage). Both keep their contents in a module; an explicit instantiation may
/// name a private member, which is the language's own way in.
namespace fsdp::detail {

template <class Archive, auto Member>
struct ArchiveModule {
  friend torch::jit::Module& module_of(Archive& archive) { return archive.*Member; }
};

torch::jit::Module& module_of(torch::serialize::OutputArchive& archive);
torch::jit::Module& module_of(torch::serialize::InputArchive& archive);

template struct ArchiveModule<torch::serialize::OutputArchive, &torch::serialize::OutputArchive::module_>;
template struct ArchiveModule<torch::serialize::InputArchive, &torch::serialize::InputArchive::module_>;

/// What was written to `out`, to be read; they share the contents.
inline torch::serialize::InputArchive reader_of(torch::serialize::OutputArchive& out) {
  torch::serialize::InputArchive in;
  module_of(in) = module_of(out);
  return in;
}

}  // namespace fsdp::detail
