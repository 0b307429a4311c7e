#include "plan/picture.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <sstream>

#include "plan/numbers.h"

namespace fsdp::plan {
namespace {

constexpr double kLeft = 120, kWidth = 960, kRight = 20;
constexpr int64_t kMostCells = 1024, kMostChapters = 24;
constexpr size_t kMostLegend = 16;

std::string escaped(const std::string& text) {
  std::string s;
  for (char c : text) {
    if (c == '&')
      s += "&amp;";
    else if (c == '<')
      s += "&lt;";
    else if (c == '>')
      s += "&gt;";
    else if (c == '"')
      s += "&quot;";
    else
      s += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return s;
}

std::string shape_text(const Shape& shape) {
  std::string s;
  for (auto d : shape) s += (s.empty() ? "(" : ", ") + std::to_string(d);
  return shape.empty() ? "()" : s + ")";
}

/// Neighbouring numbers get hues far apart.
std::string colour(size_t index) {
  return "hsl(" + std::to_string((index * 137 + 210) % 360) + ",62%," + std::to_string(index % 2 ? 78 : 68) + "%)";
}

/// Distinct pieces of the optimizer's weights and who holds them.
struct Owners {
  const Mesh& mesh;
  const std::vector<Placement>& placements;

  int64_t count() const {
    int64_t n = 1;
    for (size_t i = 0; i < placements.size(); ++i)
      if (is_sharded(placements[i])) n *= mesh.shape[i];
    return n;
  }
  /// The lowest rank that holds piece `k` (pieces in the order of the buffer).
  int64_t rank(int64_t k) const {
    int64_t rank = 0, stride = 1, left = count();
    for (int64_t i = mesh.ndim() - 1; i >= 0; --i) {
      if (is_sharded(placements[i])) {
        left /= mesh.shape[i];
        rank += k / left * stride;
        k %= left;
      }
      stride *= mesh.shape[i];
    }
    return rank;
  }
  std::string text(int64_t k) const {
    const auto copies = mesh.size() / count();
    const auto r = std::to_string(rank(k));
    return copies == 1 ? "rank " + r : "rank " + r + " and " + std::to_string(copies - 1) + " with copies";
  }
};

class Chapter {
 public:
  Chapter(const Plan& plan, const UnitPlan& unit, const GroupPlan& group, double top)
      : unit_(unit),
        group_(group),
        owners_{plan.options.mesh, group.optimizer},
        pieces_(owners_.count()),
        per_cell_((pieces_ + kMostCells - 1) / kMostCells),
        cells_((pieces_ + per_cell_ - 1) / per_cell_),
        segments_(plan.options.mesh.size() / pieces_),
        y_(top) {
    columns_ = 1;
    while (cells_ > 16 && columns_ * columns_ < cells_) columns_ *= 2;
    cell_height_ = columns_ == 1 ? 24 : 18;
    order_.resize(static_cast<size_t>(group.layout.num_tensors()));
    std::iota(order_.begin(), order_.end(), 0);
    std::erase_if(order_, [&](int64_t t) { return group.layout.numel(t) == 0; });
    std::sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
      return group.layout.tensor_to_offset[a] < group.layout.tensor_to_offset[b];
    });
    for (int64_t c = 0; c < cells_; ++c) largest_ = std::max(largest_, range_of(c).size());
    choose_colours();
  }

  /// Returns where the next chapter may begin.
  double draw(std::ostream& out) {
    title(out);
    for (int64_t c = 0; c < cells_; ++c) cell(out, c);
    y_ += static_cast<double>((cells_ + columns_ - 1) / columns_) * cell_height_ + 8;
    legend(out);
    return y_ + 28;
  }

 private:
  int64_t boundary(int64_t segment) const {
    const auto& l = group_.layout;
    return segment >= l.num_segments() ? l.size : l.rank_to_offset[segment];
  }
  Range range_of(int64_t cell) const {
    return {boundary(cell * per_cell_ * segments_), boundary((cell + 1) * per_cell_ * segments_)};
  }

  /// A colour per tensor, or per shape where there are too many tensors to tell apart.
  void choose_colours() {
    by_shape_ = group_.tensors.size() > kMostLegend;
    std::map<Shape, size_t> shapes;
    for (size_t t = 0; t < group_.tensors.size(); ++t) {
      const auto key = by_shape_ ? shapes.emplace(group_.tensors[t].shape, shapes.size()).first->second : t;
      colour_of_.push_back(key);
      if (key == legend_.size()) legend_.push_back({t, 0});
      ++legend_[key].second;
    }
  }

  void title(std::ostream& out) {
    out << "<text x='10' y='" << y_ + 16 << "' class='h'>" << escaped(unit_.name);
    if (unit_.count > 1) out << " × " << unit_.count;
    out << "</text><text x='10' y='" << y_ + 33 << "'>"
        << counted(static_cast<int64_t>(group_.tensors.size()), "tensor") << ", "
        << counted(group_.payload_before.back(), "element") << ", "
        << grouped(group_.layout.size - group_.payload_before.back()) << " of padding, in "
        << counted(pieces_, "piece");
    if (pieces_ < owners_.mesh.size()) out << ", each on " << owners_.mesh.size() / pieces_ << " ranks";
    if (per_cell_ > 1) out << "; a cell is " << per_cell_ << " pieces";
    out << "</text>\n";
    y_ += 42;
  }

  void cell(std::ostream& out, int64_t c) {
    const auto row = c / columns_, column = c % columns_;
    const double width = kWidth / static_cast<double>(columns_);
    const double x = kLeft + static_cast<double>(column) * width, y = y_ + static_cast<double>(row) * cell_height_;
    const double w = width - 1, h = cell_height_ - 2;
    const auto owner = owners_.rank(c * per_cell_);
    if (column == 0)
      out << "<text x='" << kLeft - 8 << "' y='" << y + h - 5 << "' class='r'>rank " << owner << "</text>";
    const auto range = range_of(c);
    const double scale = largest_ > 0 ? w / static_cast<double>(largest_) : 0;
    out << "<rect x='" << x << "' y='" << y << "' width='" << static_cast<double>(range.size()) * scale << "' height='"
        << h << "' class='p'/>";
    // The first tensor that ends behind the cell's begin: those before it lie in earlier cells.
    while (first_ < order_.size() && end_of(order_[first_]) <= range.begin) ++first_;
    for (size_t i = first_; i < order_.size(); ++i) {
      const auto t = order_[i];
      const auto begin = std::max(group_.layout.tensor_to_offset[t], range.begin);
      const auto end = std::min(end_of(t), range.end);
      if (group_.layout.tensor_to_offset[t] >= range.end) break;
      if (begin < end)
        part(out, c, t, x + static_cast<double>(begin - range.begin) * scale, y,
             static_cast<double>(end - begin) * scale, h);
    }
    if (columns_ > 1 && width >= 26)
      out << "<text x='" << x + w / 2 << "' y='" << y + h - 4 << "' class='n'>" << owner << "</text>";
    out << '\n';
  }

  void part(std::ostream& out, int64_t c, int64_t t, double x, double y, double w, double h) {
    const auto range = range_of(c);
    const auto rows = group_.layout.rows_in(t, range.begin, range.end);
    const auto& tensor = group_.tensors[t];
    const auto span = std::to_string(rows.begin) + ":" + std::to_string(rows.end);
    out << "<rect x='" << x << "' y='" << y << "' width='" << std::max(w, 0.25) << "' height='" << h << "' fill='"
        << colour(colour_of_[t]) << "'><title>" << escaped(owners_.text(c * per_cell_));
    if (per_cell_ > 1) out << " to " << owners_.rank(std::min((c + 1) * per_cell_, pieces_) - 1);
    out << ": " << escaped(tensor.name) << " " << shape_text(tensor.shape) << ", rows " << span << "</title></rect>";
    if (columns_ > 1) return;
    const auto full = tensor.name + " " + span;
    const auto& label = 6.2 * static_cast<double>(full.size()) + 6 < w ? full : span;
    if (6.2 * static_cast<double>(label.size()) + 6 < w)
      out << "<text x='" << x + 4 << "' y='" << y + h - 7 << "' class='t'>" << escaped(label) << "</text>";
  }

  void legend(std::ostream& out) {
    double x = kLeft;
    for (size_t k = 0; k < legend_.size() && k < 2 * kMostLegend; ++k) {
      const auto& [tensor, count] = legend_[k];
      const auto& t = group_.tensors[tensor];
      const auto text = (by_shape_ ? std::to_string(count) + " × " : t.name + " ") + shape_text(t.shape);
      const double width = 30 + 6.4 * static_cast<double>(text.size());
      if (x + width > kLeft + kWidth && x > kLeft) {
        x = kLeft;
        y_ += 18;
      }
      out << "<rect x='" << x << "' y='" << y_ << "' width='12' height='12' fill='" << colour(k) << "'/><text x='"
          << x + 17 << "' y='" << y_ + 10 << "' class='t'>" << escaped(text) << "</text>";
      x += width;
    }
    out << '\n';
    y_ += 16;
  }

  int64_t end_of(int64_t t) const { return group_.layout.tensor_to_offset[t] + group_.layout.numel(t); }

  const UnitPlan& unit_;
  const GroupPlan& group_;
  Owners owners_;
  int64_t pieces_, per_cell_, cells_, segments_, columns_ = 1, largest_ = 0;
  double y_, cell_height_ = 0;
  std::vector<int64_t> order_;  // tensors by offset
  size_t first_ = 0;
  bool by_shape_ = false;
  std::vector<size_t> colour_of_;
  std::vector<std::pair<size_t, int64_t>> legend_;  // first tensor of a colour, and how many there are
};

}  // namespace

std::string as_svg(const Plan& plan) {
  std::ostringstream body;
  double y = 40;
  int64_t chapters = 0, left_out = 0;
  for (const auto& unit : plan.units)
    for (const auto& group : unit.groups) {
      if (chapters == kMostChapters) {
        ++left_out;
        continue;
      }
      ++chapters;
      y = Chapter(plan, unit, group, y).draw(body);
    }
  if (left_out > 0) {
    body << "<text x='10' y='" << y << "'>and " << left_out << " groups more</text>\n";
    y += 20;
  }
  std::ostringstream out;
  out << "<svg xmlns='http://www.w3.org/2000/svg' width='" << kLeft + kWidth + kRight << "' height='" << std::ceil(y)
      << "' font-family='sans-serif' font-size='12'>\n"
      << "<style>.h{font-size:15px;font-weight:bold}.r{text-anchor:end}.t{font-size:11px}"
      << ".n{font-size:9px;text-anchor:middle;pointer-events:none}.p{fill:#ddd;stroke:#bbb;stroke-width:.5}</style>\n"
      << "<rect width='100%' height='100%' fill='white'/>\n<text x='10' y='24' font-size='18'>" << escaped(plan.model)
      << ": who owns which rows of the optimizer's weights, mesh " << escaped(plan.options.mesh.text()) << "</text>\n"
      << body.str() << "</svg>\n";
  return out.str();
}

}  // namespace fsdp::plan
