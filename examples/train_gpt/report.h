#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

struct StepRecord {
  int64_t step;
  double loss, tokens_per_second;
  int64_t rss_bytes;  // of this rank
};

/// Bytes that stay between steps, on this rank.
struct PersistentBytes {
  int64_t weights = 0, gradients = 0, optimizer = 0;
  int64_t total() const { return weights + gradients + optimizer; }
};

/// A progress bar on a terminal, a line now and then elsewhere.
class Progress {
 public:
  explicit Progress(int64_t steps);
  void update(const StepRecord& record);
  void finish();

 private:
  int64_t steps_;
  bool terminal_;
};

int64_t resident_bytes();
void write_jsonl(const std::filesystem::path& path, const std::vector<StepRecord>& records);
void write_svg(const std::filesystem::path& path, const std::vector<StepRecord>& records);
std::string persistent_table(const PersistentBytes& sharded, const PersistentBytes& unsharded, int64_t ranks);
