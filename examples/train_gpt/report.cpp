#include "report.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

namespace {

std::string text(const char* format, auto... values) {
  char buffer[256];
  std::snprintf(buffer, sizeof buffer, format, values...);
  return buffer;
}

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

Progress::Progress(int64_t steps) : steps_(steps), terminal_(isatty(STDOUT_FILENO)) {}

void Progress::update(const StepRecord& r) {
  const auto line = text("step %ld/%ld  loss %.4f  %.0f tokens/s  rank 0: %.0f MiB", r.step + 1, steps_, r.loss,
                         r.tokens_per_second, mib(r.rss_bytes));
  if (terminal_) {
    constexpr int64_t kWidth = 24;
    const auto full = static_cast<size_t>(kWidth * (r.step + 1) / steps_);
    std::printf("\r[%s%s] %s ", std::string(full, '=').c_str(), std::string(kWidth - full, ' ').c_str(), line.c_str());
  } else if (r.step == 0 || (r.step + 1) % std::max<int64_t>(1, steps_ / 20) == 0 || r.step + 1 == steps_) {
    std::printf("%s\n", line.c_str());
  }
  std::fflush(stdout);
}

void Progress::finish() {
  if (terminal_) std::printf("\n");
}

int64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  int64_t total = 0, resident = 0;
  in >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

void write_jsonl(const std::filesystem::path& path, const std::vector<StepRecord>& records) {
  std::ofstream out(path);
  for (const auto& r : records)
    out << text("{\"step\": %ld, \"loss\": %.6f, \"tokens_per_second\": %.1f, \"rss_bytes\": %ld}\n", r.step, r.loss,
                r.tokens_per_second, r.rss_bytes);
}

void write_svg(const std::filesystem::path& path, const std::vector<StepRecord>& records) {
  constexpr double kWidth = 640, kHeight = 320, kMargin = 48;
  double low = records.front().loss, high = low;
  for (const auto& r : records) low = std::min(low, r.loss), high = std::max(high, r.loss);
  const double span = std::max(high - low, 1e-9);
  const auto last = static_cast<double>(std::max<size_t>(records.size() - 1, 1));
  const auto x = [&](size_t i) { return kMargin + (kWidth - 2 * kMargin) * static_cast<double>(i) / last; };
  const auto y = [&](double loss) { return kMargin + (kHeight - 2 * kMargin) * (high - loss) / span; };
  std::ofstream out(path);
  out << text(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      kWidth, kHeight);
  for (int k = 0; k <= 4; ++k) {
    const double loss = low + span * k / 4;
    out << text(
        "<line x1=\"%.0f\" x2=\"%.0f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>"
        "<text x=\"6\" y=\"%.1f\">%.2f</text>\n",
        kMargin, kWidth - kMargin, y(loss), y(loss), y(loss) + 4, loss);
  }
  out << "<polyline fill=\"none\" stroke=\"#1f6feb\" stroke-width=\"1.5\" points=\"";
  for (size_t i = 0; i < records.size(); ++i) out << text("%.1f,%.1f ", x(i), y(records[i].loss));
  out << text("\"/>\n<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\">loss over %zu steps</text>\n</svg>\n",
              kWidth / 2, kHeight - 12, records.size());
}

std::string persistent_table(const PersistentBytes& sharded, const PersistentBytes& unsharded, int64_t ranks) {
  auto row = [](const char* name, int64_t a, int64_t b) {
    return text("  %-18s %12.2f MiB %12.2f MiB\n", name, mib(a), mib(b));
  };
  return text("persistent memory     per rank of %-3ld     not sharded\n", ranks) +
         row("weights", sharded.weights, unsharded.weights) + row("gradients", sharded.gradients, unsharded.gradients) +
         row("optimizer state", sharded.optimizer, unsharded.optimizer) +
         row("total", sharded.total(), unsharded.total());
}
