#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/model.h"

/// Where the shapes of a model come from. All throw ValueError that says where the description is wrong.
namespace fsdp::plan {

/// A model of the zoo; case, spaces and dashes in the name do not matter. For an unknown one the error lists the names.
Model zoo_model(std::string_view name, Dtype dtype);

/// `{"name": ..., "dtype": ..., "units": [{"name": ..., "count": 1, "root": false, "frozen": false, "dtype": ...,
/// "tensors": {"weight": [512, 512], ...}}, ...]}`; only units, and their names and tensors, are required. `dtype`,
/// when given, overrides the file's. `where` (a file name) begins every error.
Model json_model(std::string_view text, const std::string& where, std::optional<Dtype> dtype);

/// The headers of one or more files (the parts of one model). Tensors whose names agree up to and including the first
/// number ("model.layers.12") form a unit, all others the root. Tensors of integers are no parameters and are left
/// out, with a note. `dtype`, when given, replaces the files' floating point formats.
Model safetensors_model(std::span<const std::filesystem::path> files, std::optional<Dtype> dtype);

/// What the command line names: *.safetensors files, one *.json file, or one model of the zoo.
Model read_model(const std::vector<std::string>& sources, std::optional<Dtype> dtype);

}  // namespace fsdp::plan
