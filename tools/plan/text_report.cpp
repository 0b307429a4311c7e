#include <algorithm>
#include <cstdio>
#include <sstream>

#include "plan/numbers.h"
#include "plan/report.h"

namespace fsdp::plan {
namespace {

std::string percent(int64_t part, int64_t whole) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f%%",
                whole == 0 ? 0 : 100 * static_cast<double>(part) / static_cast<double>(whole));
  return text;
}

std::string padded(const std::string& text, size_t width, bool right) {
  if (text.size() >= width) return text;
  const std::string space(width - text.size(), ' ');
  return right ? space + text : text + space;
}

/// Columns as wide as their widest cell; the first `left` of them begin at the left.
class Table {
 public:
  explicit Table(size_t left) : left_(left) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void write(std::ostream& out) const {
    std::vector<size_t> widths;
    for (const auto& r : rows_)
      for (size_t c = 0; c < r.size(); ++c) {
        if (c == widths.size()) widths.push_back(0);
        widths[c] = std::max(widths[c], r[c].size());
      }
    for (const auto& r : rows_) {
      std::string line = " ";
      for (size_t c = 0; c < r.size(); ++c) line.append(" ").append(padded(r[c], widths[c], c >= left_)).append(" ");
      line.erase(line.find_last_not_of(' ') + 1);
      out << line << '\n';
    }
  }

 private:
  size_t left_;
  std::vector<std::vector<std::string>> rows_;
};

std::string layout_text(const Options& o) {
  std::string text = o.layout == Options::Layout::kPadded     ? "padded"
                     : o.layout == Options::Layout::kUnpadded ? "unpadded"
                                                              : "tensor-atomic";
  if (o.block > 1) text += ", blocks of " + std::to_string(o.block) + " rows";
  return text;
}

std::string dtypes_text(const Plan& plan) {
  std::vector<std::string> seen;
  std::string text;
  for (const auto& u : plan.units)
    for (const auto& g : u.groups) {
      std::string line = std::string("computes in ") + name_of(g.compute) + ", weights kept in " + name_of(g.main);
      if (g.trainable) {
        line += std::string(", gradients in ") + name_of(g.grad);
        if (g.comm) line += std::string(", on the wire ") + name_of(*g.comm);
      } else {
        line += ", frozen";
      }
      if (std::find(seen.begin(), seen.end(), line) != seen.end()) continue;
      seen.push_back(line);
      text += "  " + line + "\n";
    }
  return text;
}

void write_units(std::ostream& out, const Plan& plan) {
  constexpr size_t kMost = 40;
  Table table(1);
  table.row({"unit", "count", "parameters", "shard, elements", "padding"});
  for (size_t i = 0; i < plan.units.size() && i < kMost; ++i) {
    const auto& u = plan.units[i];
    int64_t largest = 0;
    for (const auto& g : u.groups)
      for (int64_t s = 0; s < g.layout.num_segments(); ++s) largest = std::max(largest, g.layout.rank_size(s));
    table.row({u.name, std::to_string(u.count), grouped(u.payload()), grouped(largest),
               percent(u.size() - u.payload(), u.payload())});
  }
  table.write(out);
  if (plan.units.size() > kMost) out << "  ... and " << plan.units.size() - kMost << " units more\n";
}

void write_memory(std::ostream& out, const Report& r) {
  const auto& f = r.figures;
  const bool shared = f.rest.weights < f.rest.main_weights + f.rest.model_weights;
  out << "memory of rank " << f.rank << (r.largest && r.plan.options.mesh.size() > 1 ? " (no rank holds more)" : "")
      << "\n";
  Table table(1);
  auto line = [&](const std::string& what, int64_t bytes, const std::string& remark = "") {
    table.row({what, sized(bytes), grouped(bytes), remark});
  };
  line("optimizer's weights", f.rest.main_weights);
  line("compute weights", f.rest.model_weights, shared ? "(in the same memory)" : "");
  line("gradients", f.rest.gradients);
  line("optimizer state", f.rest.optimizer_state);
  line("at rest", f.rest.total());
  line("transient peak", f.peak.at.total());
  line("  full weights", f.peak.at.weights);
  line("  gradients to reduce", f.peak.at.packed);
  line("  gradients that wait", f.peak.at.accumulators);
  line("  gradients of autograd", f.peak.at.gradients);
  line("in all", f.total());
  table.write(out);
  out << "  the peak is in the " << f.peak.where << "; activations come on top\n";
}

void write_traffic(std::ostream& out, const Report& r) {
  const auto& o = r.plan.options;
  out << "communication of a step of " << counted(o.microbatches, "microbatch") << "\n";
  const auto& all = r.figures.traffic;
  if (all.empty()) {
    out << "  none: one rank has everything\n";
    return;
  }
  Table table(3);
  table.row({"axis", "collective", "dtype", "calls", "elements", "bytes", "a rank sends"});
  for (const auto& t : all)
    table.row({o.mesh.axes[t.axis], t.operation, name_of(t.dtype), grouped(t.calls), grouped(t.elements),
               sized(t.bytes), sized(t.sent)});
  const auto s = sum(all);
  table.row({"all", "", "", grouped(s.calls), "", sized(s.bytes), sized(s.sent)});
  table.write(out);
}

std::string choice_text(const Choice& c) { return c.strategy + " on " + c.mesh.text() + " (" + sized(c.bytes) + ")"; }

void write_fit(std::ostream& out, const Report& r) {
  const auto& fit = *r.fit;
  const auto& f = r.figures;
  out << "in " << sized(fit.memory) << " per GPU\n";
  if (fit.fits()) {
    out << "  fits: " << sized(fit.asked.bytes) << ", " << sized(fit.memory - fit.asked.bytes)
        << " are left for activations\n";
  } else {
    out << "  does not fit: " << sized(fit.asked.bytes - fit.memory) << " too much";
    if (f.peak.at.total() > fit.memory)
      out << "; the transient peak alone is more, so divide the model into smaller units";
    out << "\n";
  }
  const bool two =
      std::any_of(fit.same_ranks.begin(), fit.same_ranks.end(), [](const Choice& c) { return c.mesh.ndim() == 2; });
  Table table(2);
  auto row = [&](std::vector<std::string> cells, const std::string& outer, const std::string& fits) {
    if (two) cells.push_back(outer);
    cells.push_back(fits);
    table.row(std::move(cells));
  };
  row({"strategy", "mesh", "largest rank", "a rank sends"}, "of it over outer", "");
  for (const auto& c : fit.same_ranks)
    row({c.strategy, c.mesh.text(), sized(c.bytes), sized(c.sent)}, c.mesh.ndim() == 2 ? sized(c.outer) : "",
        c.bytes <= fit.memory ? "fits" : "");
  table.write(out);
  if (fit.fits()) return;
  if (fit.best)
    out << "  fits and sends least: " << choice_text(*fit.best) << "\n";
  else if (fit.more_ranks)
    out << "  nothing fits on " << r.plan.options.mesh.size() << " ranks; " << choice_text(*fit.more_ranks)
        << " does\n";
  else
    out << "  nothing fits, on any number of ranks: divide the model into smaller units, or compute in fewer bits\n";
}

}  // namespace

std::string as_text(const Report& r) {
  std::ostringstream out;
  const auto& p = r.plan;
  const auto& o = p.options;
  out << p.model << ": " << grouped(p.parameters()) << " parameters\n"
      << "mesh " << o.mesh.text() << ", " << counted(o.mesh.size(), "rank") << ", " << r.strategy << "\n"
      << "  weights " << to_string(std::span(o.placements.parameter)) << ", gradients "
      << to_string(std::span(o.placements.gradient)) << ", optimizer " << to_string(std::span(o.placements.optimizer))
      << "\n"
      << "  layout " << layout_text(o) << ", optimizer state " << o.optimizer_state << " per parameter\n"
      << dtypes_text(p) << "\n";
  write_units(out, p);
  out << "  padding in all " << grouped(p.padding()) << " elements, " << percent(p.padding(), p.parameters()) << "\n\n";
  write_memory(out, r);
  out << "\n";
  write_traffic(out, r);
  if (r.fit) {
    out << "\n";
    write_fit(out, r);
  }
  if (p.padding() > p.parameters() / 20)
    out << "note: padding is " << percent(p.padding(), p.parameters())
        << " of the parameters: --layout unpadded has none; fewer ranks, or larger units, have less\n";
  for (const auto& note : r.notes) out << "note: " << note << "\n";
  return out.str();
}

}  // namespace fsdp::plan
