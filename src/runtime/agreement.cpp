#include <algorithm>
#include <sstream>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include "runtime/context_state.h"
#include "runtime/unit.h"

namespace fsdp::detail {
namespace {

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) result.push_back(line);
  return result;
}

at::Tensor gather(Communicator& comm, const at::Tensor& mine) {
  auto all = at::empty({comm.size() * mine.numel()}, mine.options());
  comm.all_gather(all, mine).wait();
  return all.cpu();
}

/// The texts differ: exchange them and say where.
[[noreturn]] void report_difference(Communicator& comm, const std::string& mine) {
  const auto device = at::TensorOptions().device(comm.device());
  auto sizes = gather(comm, at::tensor({static_cast<int64_t>(mine.size())}, at::kLong).to(comm.device()));
  const auto longest = sizes.max().item<int64_t>();
  auto padded = mine;
  padded.resize(static_cast<size_t>(longest), '\n');
  auto bytes = at::empty({longest}, at::kByte);
  std::copy(padded.begin(), padded.end(), bytes.data_ptr<uint8_t>());
  auto all = gather(comm, bytes.to(device.dtype(at::kByte)));
  auto text_of = [&](int64_t rank) {
    const auto* begin = all.data_ptr<uint8_t>() + rank * longest;
    return lines(std::string(begin, begin + sizes[rank].item<int64_t>()));
  };
  const auto first = text_of(0);
  for (int64_t rank = 1; rank < comm.size(); ++rank) {
    const auto other = text_of(rank);
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const auto a = i < first.size() ? first[i] : "(nothing)", b = i < other.size() ? other[i] : "(nothing)";
      if (a != b)
        throw StateError(
            fmt::format("ranks of mesh axis '{}' built different models; the first difference: rank 0 has {}, "
                        "rank {} has {}. Build the model, seed and load it the same on every rank before "
                        "fully_shard",
                        comm.axes(), a, rank, b));
    }
  }
  throw StateError(fmt::format("ranks of mesh axis '{}' built different models", comm.axes()));
}

}  // namespace

void ContextState::check_ranks_agree() {
  std::vector<std::pair<DeviceMesh, std::string>> meshes;
  for (auto* unit : forward) {
    auto it = std::find_if(meshes.begin(), meshes.end(), [&](const auto& m) { return m.first == *unit->mesh; });
    if (it == meshes.end()) it = meshes.insert(meshes.end(), {*unit->mesh, ""});
    it->second += fmt::format("unit '{}' ({})\n{}", unit->name, unit->local_name, unit->signature);
  }
  for (auto& [mesh, text] : meshes) {
    if (mesh.size() == 1) continue;
    auto& comm = mesh.communicator_all(Channel::kControl);
    if (comm.backend() == "fake") continue;  // nothing comes from the other ranks
    const auto hash = static_cast<int64_t>(std::hash<std::string>{}(text));
    auto hashes = gather(comm, at::tensor({hash}, at::kLong).to(comm.device()));
    // Every rank sees the same hashes, so either all of them exchange texts or none.
    if (!hashes.eq(hash).all().item<bool>()) report_difference(comm, text);
  }
}

}  // namespace fsdp::detail
