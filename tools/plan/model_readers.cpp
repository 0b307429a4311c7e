#include "plan/model_readers.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include <fsdp/error.h>

namespace fsdp::plan {

Model read_model(const std::vector<std::string>& sources, std::optional<Dtype> dtype) {
  if (sources.empty()) throw ValueError("expected a model: a name of the zoo, a .json file, or .safetensors files");
  std::vector<std::filesystem::path> files(sources.begin(), sources.end());
  const auto tensors =
      std::count_if(files.begin(), files.end(), [](const auto& f) { return f.extension() == ".safetensors"; });
  if (tensors == static_cast<int64_t>(files.size())) return safetensors_model(files, dtype);
  if (files.size() > 1)
    throw ValueError("expected one model, got \"" + sources[0] + "\" and \"" + sources[1] +
                     "\"; only .safetensors files may be several");
  if (files[0].extension() != ".json") return zoo_model(sources[0], dtype.value_or(Dtype::kFloat32));
  std::ifstream in(files[0], std::ios::binary);
  if (!in) throw ValueError(sources[0] + ": cannot be read");
  std::ostringstream text;
  text << in.rdbuf();
  return json_model(text.str(), sources[0], dtype);
}

}  // namespace fsdp::plan
