#pragma once

#include <filesystem>
#include <string>

#include <torch/torch.h>

/// The bytes of a text file, or of all regular files under a folder in order of their paths (up to `limit` bytes).
/// std::invalid_argument when there are fewer than `least`.
torch::Tensor load_bytes(const std::filesystem::path& path, int64_t least, int64_t limit = 64 << 20);

/// `batch` sequences of `length` + 1 bytes from random places; the same for the same generator state.
torch::Tensor sample_batch(const torch::Tensor& bytes, int64_t batch, int64_t length, torch::Generator& generator);
