#include "runtime/texts.h"

#include <algorithm>
#include <functional>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

namespace fsdp::detail {
namespace {

at::Tensor gather(Communicator& comm, const at::Tensor& values, std::string_view purpose) {
  const auto mine = values.to(comm.device());
  auto all = at::empty({comm.size() * mine.numel()}, mine.options());
  comm.all_gather(all, mine, {}, purpose).wait();
  return all.cpu();
}

at::Tensor number(size_t n) { return at::tensor({static_cast<int64_t>(n)}, at::kLong); }

}  // namespace

std::vector<std::string> exchange_texts(Communicator& comm, const std::string& mine, std::string_view purpose) {
  const auto sizes = gather(comm, number(mine.size()), purpose);
  std::vector<std::string> texts(static_cast<size_t>(comm.size()));
  const auto longest = sizes.max().item<int64_t>();
  if (longest == 0) return texts;
  auto bytes = at::zeros({longest}, at::kByte);
  std::copy(mine.begin(), mine.end(), bytes.data_ptr<uint8_t>());
  const auto all = gather(comm, bytes, purpose);
  for (int64_t r = 0; r < comm.size(); ++r) {
    const auto* begin = all.data_ptr<uint8_t>() + r * longest;
    texts[static_cast<size_t>(r)].assign(begin, begin + sizes[r].item<int64_t>());
  }
  return texts;
}

bool same_everywhere(Communicator& comm, const std::string& mine, std::string_view purpose) {
  const auto hashes = gather(comm, number(std::hash<std::string>{}(mine)), purpose);
  return hashes.eq(hashes[0]).all().item<bool>();
}

}  // namespace fsdp::detail
