#include "data.h"

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <vector>

namespace fs = std::filesystem;

torch::Tensor load_bytes(const fs::path& path, int64_t least, int64_t limit) {
  std::vector<fs::path> files;
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::recursive_directory_iterator(path))
      if (entry.is_regular_file()) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(path);
  }
  std::string text;
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    if (!in) throw std::invalid_argument("cannot read '" + file.string() + "'");
    text.append(std::istreambuf_iterator<char>(in), {});
    if (static_cast<int64_t>(text.size()) >= limit) break;
  }
  text.resize(std::min<size_t>(text.size(), static_cast<size_t>(limit)));
  if (static_cast<int64_t>(text.size()) < least)
    throw std::invalid_argument("'" + path.string() + "' holds " + std::to_string(text.size()) + " bytes; at least " +
                                std::to_string(least) + " are needed");
  auto bytes = torch::empty({static_cast<int64_t>(text.size())}, torch::kByte);
  std::copy(text.begin(), text.end(), reinterpret_cast<char*>(bytes.data_ptr<uint8_t>()));
  return bytes;
}

torch::Tensor sample_batch(const torch::Tensor& bytes, int64_t batch, int64_t length, torch::Generator& generator) {
  auto starts = torch::randint(bytes.numel() - length, {batch, 1}, generator, torch::kLong);
  return bytes.index({starts + torch::arange(length + 1)}).to(torch::kLong);
}
