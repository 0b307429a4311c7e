#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/layout.h>

#include "checkpoint/file.h"

namespace fsdp::detail {

/// Under this key a file's metadata has the id of its checkpoint.
inline constexpr const char* kIdKey = "save";

/// Some rows of a stored tensor: contiguous bytes of one file.
struct Piece {
  std::string file;  // in the checkpoint's folder
  GlobalLayout::Rows rows;
  int64_t offset = 0;  // in bytes, from the beginning of the file
};

/// A whole tensor as stored, whatever files its rows are in.
struct StoredTensor {
  Shape shape;  // of the whole tensor; [] has one row
  at::ScalarType dtype = at::kFloat;
  std::vector<Piece> pieces;  // in order of rows

  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t row_bytes() const;
  /// Whether the shape has a size in 64 bits.
  bool has_size() const;
  /// The first row that is in no piece, or in two; -1 when every row is there once. Sorts the pieces.
  int64_t uncovered_row();
  /// "[6, 4] Float"
  std::string describe() const;
};

/// Whether two CPU tensors hold the same bytes: a NaN is equal to itself.
bool same_bytes(const at::Tensor& a, const at::Tensor& b);

/// Reads rows of stored tensors; opens each file once. Belongs to one thread.
class PieceReader {
 public:
  /// Files of a checkpoint must carry its `id`; others have none.
  explicit PieceReader(std::filesystem::path folder, std::string id = {})
      : folder_(std::move(folder)), id_(std::move(id)) {}

  /// Rows [begin, end) as a CPU tensor [end - begin, ...] of the stored dtype. CheckpointError naming the file.
  at::Tensor read(const StoredTensor& tensor, GlobalLayout::Rows rows);
  /// CheckpointError, naming `what`, unless another rank stored the rows that this one holds.
  void require_same(const StoredTensor& stored, GlobalLayout::Rows rows, const at::Tensor& mine,
                    const std::string& what);

 private:
  const File& file(const std::string& name);

  std::filesystem::path folder_;
  std::string id_;
  std::map<std::string, File> files_;
};

}  // namespace fsdp::detail
