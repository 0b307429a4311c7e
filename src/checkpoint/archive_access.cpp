#include "checkpoint/archive_access.h"

namespace fsdp::detail {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

torch::jit::Module& contents_of(OutputArchive& archive);
torch::jit::Module& contents_of(InputArchive& archive);

/// An explicit instantiation may name a private member, which is the language's own way in.
template <class Archive, auto Member>
struct ArchiveModule {
  friend torch::jit::Module& contents_of(Archive& archive) { return archive.*Member; }
};

template struct ArchiveModule<OutputArchive, &OutputArchive::module_>;
template struct ArchiveModule<InputArchive, &InputArchive::module_>;

}  // namespace

torch::jit::Module& module_of(OutputArchive& archive) { return contents_of(archive); }
torch::jit::Module& module_of(InputArchive& archive) { return contents_of(archive); }

}  // namespace fsdp::detail
