#include <fsdp/distributed/communicator.h>

#include <exception>
#include <numeric>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include "distributed/comm_trace.h"

namespace fsdp {

using detail::OpInfo;

Work::Work(std::shared_ptr<detail::WorkImpl> impl, std::string what) : impl_(std::move(impl)), what_(std::move(what)) {}

void Work::wait() {
  if (!impl_) return;
  try {
    impl_->wait();
  } catch (const std::exception& e) {
    throw CommError(fmt::format("{} failed: {}", what_, e.what()));
  }
}

bool Work::done() const { return !impl_ || impl_->done(); }

namespace {

uint64_t mix(uint64_t h, uint64_t v) {
  h ^= v + 0x9e3779b97f4a7c15ull + (h << 6) + (h >> 2);
  return h * 0xff51afd7ed558ccdull;
}

uint64_t hash_text(std::string_view text) {
  uint64_t h = 1469598103934665603ull;
  for (unsigned char c : text) h = (h ^ c) * 1099511628211ull;
  return h;
}

std::vector<int64_t> filled(Counts counts, int64_t size, int64_t total, const char* what) {
  if (!counts.empty()) {
    if (static_cast<int64_t>(counts.size()) != size)
      throw ValueError(fmt::format("{}: expected one count per rank ({}), got {}", what, size, counts.size()));
    int64_t sum = 0;
    for (auto c : counts) {
      if (c < 0) throw ValueError(fmt::format("{}: negative count {}", what, c));
      sum += c;
    }
    if (sum != total)
      throw ValueError(fmt::format("{}: the counts add up to {}, the buffer has {} elements", what, sum, total));
    return {counts.begin(), counts.end()};
  }
  if (total % size != 0)
    throw ValueError(fmt::format("{}: {} elements do not divide among {} ranks; give counts", what, total, size));
  return std::vector<int64_t>(static_cast<size_t>(size), total / size);
}

void check_tensor(const at::Tensor& t, const char* what, const char* name, c10::Device device) {
  if (!t.defined()) throw ValueError(fmt::format("{}: {} is undefined", what, name));
  if (t.dim() != 1 || !t.is_contiguous())
    throw ValueError(fmt::format("{}: {} must be one-dimensional and contiguous, got {} dimensions{}", what, name,
                                 t.dim(), t.is_contiguous() ? "" : ", strided"));
  if (t.device().type() != device.type())
    throw ValueError(
        fmt::format("{}: {} is on {}, the communicator on {}", what, name, t.device().str(), device.str()));
}

void check_count(const at::Tensor& t, int64_t expected, const char* what, const char* name) {
  if (t.numel() != expected)
    throw ValueError(fmt::format("{}: expected {} elements in {}, got {}", what, expected, name, t.numel()));
}

void check_dtypes(const at::Tensor& a, const at::Tensor& b, const char* what) {
  if (a.scalar_type() != b.scalar_type())
    throw ValueError(
        fmt::format("{}: out is {}, in is {}", what, c10::toString(a.scalar_type()), c10::toString(b.scalar_type())));
}

void copy_unless_same(const at::Tensor& out, const at::Tensor& in) {
  if (out.numel() > 0 && out.data_ptr() != in.data_ptr()) out.copy_(in);
}

void scale_in_place(const at::Tensor& t, double scale) {
  if (scale != 1.0) t.mul_(scale);
}

}  // namespace

Communicator::Communicator(int64_t rank, int64_t size, c10::Device device, std::string axes,
                           std::chrono::milliseconds timeout, std::shared_ptr<detail::CommTrace> trace)
    : rank_(rank), size_(size), device_(device), axes_(std::move(axes)), timeout_(timeout), trace_(std::move(trace)) {}

OpInfo Communicator::begin(const char* operation, int64_t elements, at::ScalarType dtype, std::string_view unit) {
  const auto position = sequence_++;
  uint64_t tag = mix(hash_text(operation), static_cast<uint64_t>(elements));
  tag = mix(tag, static_cast<uint64_t>(dtype));
  tag = mix(mix(tag, hash_text(unit)), position);
  OpInfo info{operation, elements, dtype, unit, tag};
  if (trace_ && trace_->checks_ranks()) check_ranks(info, position);
  if (trace_ && !control_) trace_->record({axes_, operation, elements, std::string(unit), dtype});
  return info;
}

Work Communicator::submitted(WorkPtr work, const OpInfo& info) const { return Work(std::move(work), describe(info)); }

std::string Communicator::describe(const OpInfo& info) const {
  return fmt::format("rank {} of {} on mesh axis '{}': {} of {} {} elements{}", rank_, size_, axes_, info.operation,
                     info.elements, c10::toString(info.dtype),
                     info.unit.empty() ? "" : fmt::format(", unit '{}'", info.unit));
}

/// Every rank writes down what it is about to do; the exchange itself has a fixed size and order, so it works also when
/// the operations differ.
void Communicator::check_ranks(const OpInfo& info, uint64_t position) {
  constexpr int64_t kLength = 256;
  auto text = fmt::format("{} of {} {} elements, unit '{}'", info.operation, info.elements, c10::toString(info.dtype),
                          info.unit);
  text.resize(kLength, '\0');
  auto mine = at::empty({kLength}, at::kByte);
  std::copy(text.begin(), text.end(), mine.data_ptr<uint8_t>());
  auto all = at::empty({kLength * size_}, at::TensorOptions().dtype(at::kByte).device(device_));
  const std::vector<int64_t> counts(static_cast<size_t>(size_), kLength);
  const OpInfo check{"rank check", kLength * size_, at::kByte, info.unit, mix(hash_text("fsdp rank check"), position)};
  submitted(do_all_gather(all, mine.to(device_), counts, check), check).wait();
  all = all.cpu();
  for (int64_t r = 0; r < size_; ++r) {
    const std::string other(reinterpret_cast<const char*>(all.data_ptr<uint8_t>()) + r * kLength, kLength);
    if (other != text)
      throw CommError(fmt::format(
          "ranks of mesh axis '{}' submit different collectives: rank {} {}, rank {} {}. All ranks must run "
          "the same units in the same order",
          axes_, rank_, text.c_str(), r, other.c_str()));
  }
}

Work Communicator::all_gather(const at::Tensor& out, const at::Tensor& in, Counts counts, std::string_view unit) {
  check_tensor(out, "all_gather", "out", device_);
  check_tensor(in, "all_gather", "in", device_);
  check_dtypes(out, in, "all_gather");
  const auto parts = filled(counts, size_, out.numel(), "all_gather");
  check_count(in, parts[rank_], "all_gather", "in");
  if (size_ == 1) {
    c10::NoGradGuard no_grad;
    copy_unless_same(out, in);
    return {};
  }
  const auto info = begin("all_gather", out.numel(), out.scalar_type(), unit);
  return submitted(do_all_gather(out, in, parts, info), info);
}

Work Communicator::reduce_scatter(const at::Tensor& out, const at::Tensor& in, double scale, Counts counts,
                                  std::string_view unit) {
  check_tensor(out, "reduce_scatter", "out", device_);
  check_tensor(in, "reduce_scatter", "in", device_);
  check_dtypes(out, in, "reduce_scatter");
  const auto parts = filled(counts, size_, in.numel(), "reduce_scatter");
  check_count(out, parts[rank_], "reduce_scatter", "out");
  if (size_ == 1) {
    c10::NoGradGuard no_grad;
    copy_unless_same(out, in);
    scale_in_place(out, scale);
    return {};
  }
  const auto info = begin("reduce_scatter", in.numel(), in.scalar_type(), unit);
  return submitted(do_reduce_scatter(out, in, scale, parts, info), info);
}

Work Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op, double scale, std::string_view unit) {
  check_tensor(tensor, "all_reduce", "tensor", device_);
  if ((op == ReduceOp::kMin || op == ReduceOp::kMax) && scale != 1.0)
    throw ValueError(fmt::format("all_reduce: a minimum or maximum is not scaled, got scale {}", scale));
  if (op == ReduceOp::kAvg) {
    op = ReduceOp::kSum;
    scale /= static_cast<double>(size_);
  }
  if (size_ == 1) {
    c10::NoGradGuard no_grad;
    scale_in_place(tensor, scale);
    return {};
  }
  const auto info = begin("all_reduce", tensor.numel(), tensor.scalar_type(), unit);
  return submitted(do_all_reduce(tensor, op, scale, info), info);
}

Work Communicator::broadcast(const at::Tensor& tensor, int64_t root, std::string_view unit) {
  check_tensor(tensor, "broadcast", "tensor", device_);
  if (root < 0 || root >= size_)
    throw ValueError(fmt::format("broadcast: root {} is not one of the {} ranks", root, size_));
  if (size_ == 1) return {};
  const auto info = begin("broadcast", tensor.numel(), tensor.scalar_type(), unit);
  return submitted(do_broadcast(tensor, root, info), info);
}

Work Communicator::all_to_all(const at::Tensor& out, const at::Tensor& in, Counts out_counts, Counts in_counts,
                              std::string_view unit) {
  check_tensor(out, "all_to_all", "out", device_);
  check_tensor(in, "all_to_all", "in", device_);
  check_dtypes(out, in, "all_to_all");
  const auto to = filled(in_counts, size_, in.numel(), "all_to_all");
  const auto from = filled(out_counts, size_, out.numel(), "all_to_all");
  if (to[rank_] != from[rank_])
    throw ValueError(
        fmt::format("all_to_all: this rank sends itself {} elements and expects {}", to[rank_], from[rank_]));
  if (size_ == 1) {
    c10::NoGradGuard no_grad;
    copy_unless_same(out, in);
    return {};
  }
  // What the ranks move differs by nature, so their number is no part of what must agree.
  const auto info = begin("all_to_all", 0, in.scalar_type(), unit);
  return submitted(do_all_to_all(out, in, from, to, info), info);
}

void Communicator::barrier() {
  if (size_ == 1) return;
  const OpInfo info{"barrier", 0, at::kByte, "", mix(hash_text("barrier"), sequence_++)};
  submitted(do_barrier(info), info).wait();
}

std::shared_ptr<Communicator> Communicator::split(int64_t color, int64_t key, std::string axes) {
  return do_split(color, key, std::move(axes));
}

at::Tensor Communicator::empty(int64_t elements, at::ScalarType dtype) {
  return at::empty({elements}, at::TensorOptions().dtype(dtype).device(device_));
}

CommGroup::~CommGroup() noexcept(false) { comm_.group_end(); }

}  // namespace fsdp
