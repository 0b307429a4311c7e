#include "checkpoint/pieces.h"

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "safetensors/header.h"

namespace fsdp::detail {

int64_t StoredTensor::row_bytes() const {
  auto n = static_cast<int64_t>(c10::elementSize(dtype));
  for (size_t i = 1; i < shape.size(); ++i) n *= shape[i];
  return n;
}

bool StoredTensor::has_size() const {
  auto n = static_cast<int64_t>(c10::elementSize(dtype));
  for (auto s : shape)
    if (s < 0 || (n > 0 && __builtin_mul_overflow(n, s, &n))) return false;
  return true;
}

int64_t StoredTensor::uncovered_row() {
  if (row_bytes() == 0) return -1;
  std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.rows.begin < b.rows.begin; });
  int64_t next = 0;
  for (const auto& piece : pieces) {
    if (piece.rows.begin != next) return std::min(piece.rows.begin, next);
    next = piece.rows.end;
  }
  return next == rows() ? -1 : std::min(next, rows());
}

std::string StoredTensor::describe() const {
  return fmt::format("[{}] {}", fmt::join(shape, ", "), c10::toString(dtype));
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

const File& PieceReader::file(const std::string& name) {
  const auto known = files_.find(name);
  if (known != files_.end()) return known->second;
  constexpr size_t kMostOpen = 64;  // a checkpoint of many ranks has more files than a process may open
  if (files_.size() == kMostOpen) files_.clear();
  if (!id_.empty()) {
    const auto metadata = safetensors::read_header(folder_ / name).metadata;
    if (std::find(metadata.begin(), metadata.end(), std::pair(std::string(kIdKey), id_)) == metadata.end())
      throw CheckpointError(fmt::format("{} is of another save than the manifest beside it; the checkpoint is damaged",
                                        (folder_ / name).string()));
  }
  return files_.emplace(name, File::open(folder_ / name)).first->second;
}

at::Tensor PieceReader::read(const StoredTensor& tensor, GlobalLayout::Rows rows) {
  auto shape = tensor.shape.empty() ? Shape{1} : tensor.shape;
  shape[0] = rows.end - rows.begin;
  auto result = at::empty(shape, tensor.dtype);
  auto* bytes = static_cast<char*>(result.data_ptr());
  const auto row = tensor.row_bytes();
  if (row == 0) return result;
  for (const auto& piece : tensor.pieces) {
    const auto begin = std::max(rows.begin, piece.rows.begin), end = std::min(rows.end, piece.rows.end);
    if (begin >= end) continue;
    file(piece.file)
        .read(bytes + (begin - rows.begin) * row, (end - begin) * row, piece.offset + (begin - piece.rows.begin) * row);
  }
  return result;
}

void PieceReader::require_same(const StoredTensor& stored, GlobalLayout::Rows rows, const at::Tensor& mine,
                               const std::string& what) {
  if (rows.end <= stored.rows() && same_bytes(read(stored, rows), mine)) return;
  throw CheckpointError(fmt::format(
      "{} has other values on this rank than on the rank that stores it. If these are different tensors, give "
      "CheckpointOptions::name to tell them apart; if they are one, make them equal first",
      what));
}

}  // namespace fsdp::detail
