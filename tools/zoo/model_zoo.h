#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fsdp/layout.h>

/// Parameter shapes of public models, divided into the units one would shard: for the planner's tests and documents.
namespace fsdp::zoo {

struct Unit {
  std::string name;
  int64_t count = 1;      ///< times it occurs in the model
  bool is_block = false;  ///< a transformer block
  std::vector<Shape> shapes;
  bool root = false;  ///< lies around the others: its parameters are used first and last
};

struct Model {
  std::string name;
  std::string source;       ///< where the numbers come from
  std::vector<Unit> units;  ///< in order of forward, a root first
};

/// Weights as torch.nn modules hold them: Linear [out, in], Conv [out, in, ...], Embedding [entries, width].
const std::vector<Model>& models();

}  // namespace fsdp::zoo
