#include "runtime/parameter.h"

#include <algorithm>
#include <numeric>

namespace fsdp::detail {

ParameterShape::ParameterShape(const at::Tensor& parameter) : sizes(parameter.sizes().vec()) {
  order.resize(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  const auto strides = parameter.strides();
  if (sizes.size() > 2 && parameter.numel() > 0 && parameter.is_non_overlapping_and_dense()) {
    std::stable_sort(order.begin() + 1, order.end(), [&](auto a, auto b) { return strides[a] > strides[b]; });
    const bool rows_outermost = std::all_of(sizes.begin() + 1, sizes.end(), [&, d = size_t{1}](auto) mutable {
      return strides[0] >= strides[d++] || sizes[0] == 1;
    });
    if (!rows_outermost) std::iota(order.begin(), order.end(), 0);
  }
  inverse.resize(order.size());
  for (size_t i = 0; i < order.size(); ++i) inverse[order[i]] = static_cast<int64_t>(i);
  if (parameter.numel() == 0) {
    planned = {0};
  } else if (sizes.empty()) {
    planned = {1};
  } else {
    planned = sizes;
  }
}

at::Tensor ParameterShape::view(const at::Tensor& flat, int64_t offset, int64_t rows) const {
  auto local = sizes.empty() ? std::vector<int64_t>{1} : sizes;
  local[0] = rows;
  int64_t n = 1;
  for (auto s : local) n *= s;
  if (n == 0) return flat.narrow(0, 0, 0).view(local);
  auto rows_of = flat.narrow(0, offset, n);
  if (sizes.size() < 2) return rows_of;
  std::vector<int64_t> in_memory(local.size());
  for (size_t i = 0; i < local.size(); ++i) in_memory[i] = local[order[i]];
  return rows_of.view(in_memory).permute(inverse);
}

at::Tensor ParameterShape::rows(const at::Tensor& flat, const GlobalLayout& layout, const ElementRange& range,
                                int64_t index) const {
  const auto r = layout.rows_in(index, range.begin, range.end);
  return view(flat, layout.tensor_to_offset[index] + r.begin * layout.row_size(index) - range.begin, r.end - r.begin);
}

at::Tensor ParameterShape::whole(const at::Tensor& flat, int64_t offset) const {
  if (sizes.empty()) return flat.narrow(0, offset, 1).view(at::IntArrayRef{});
  return view(flat, offset, sizes[0]);
}

at::Tensor Handle::lock() const {
  auto strong = weak_.lock();
  return strong ? at::Tensor(std::move(strong)) : at::Tensor();
}

void Handle::show(const at::Tensor& view) const {
  // Not set_data: that refuses meta tensors and drops the gradient accumulator when the dtype changes.
  if (auto strong = weak_.lock()) strong->shallow_copy_from(view.getIntrusivePtr());
}

}  // namespace fsdp::detail
