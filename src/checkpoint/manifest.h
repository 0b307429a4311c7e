#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "checkpoint/optimizer_state.h"
#include "checkpoint/pieces.h"

namespace fsdp::detail {

/// What a checkpoint holds, and where. Each rank writes one of its own pieces; together they are the whole.
struct Manifest {
  struct Parameter {
    std::map<std::string, StoredTensor> rows;  // by the optimizer's name: "exp_avg"
    std::map<std::string, c10::IValue> values;
    ParameterOptions options;
    bool has_state = false;
  };

  std::string id;  // of the save; also in each file, so that files of different saves do not mix
  int64_t world_size = 0;
  std::map<std::string, std::string> notes;
  std::map<std::string, StoredTensor> tensors;  // of the module
  std::map<std::string, std::string> aliases;   // further name: name in tensors
  std::map<std::string, Parameter> optimizer;   // by name in tensors
  std::map<std::string, int64_t> files;         // in bytes

  /// Adds another rank's part. CheckpointError naming what the ranks do not agree on.
  void add(const Manifest& part, const std::string& whose);
  /// CheckpointError naming a tensor of which a row is missing, or a name that is one tensor here and another there.
  void check_complete();
  void check_names() const;
  /// CheckpointError, with `where`, unless every row of every tensor has its place in one of the files.
  void check_pieces(const std::string& where);
  /// The tensor stored under a name; null if there is none.
  const StoredTensor* find(const std::string& name) const;
  /// The name it is stored under.
  const std::string& stored_name(const std::string& name) const;

  std::string to_json() const;
  /// CheckpointError, with `where`, for anything else than what to_json() writes.
  static Manifest from_json(std::string_view text, const std::string& where);
};

}  // namespace fsdp::detail
