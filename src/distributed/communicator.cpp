#include <fsdp/distributed/communicator.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <numeric>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distributed/comm_trace.h"
#include "distributed/failures.h"

namespace fsdp {

using detail::OpInfo;

Work::Work(std::shared_ptr<detail::WorkImpl> impl, std::string what, std::shared_ptr<detail::CommFailure> failure)
    : impl_(std::move(impl)), what_(std::move(what)), failure_(std::move(failure)) {}

void Work::wait() {
  if (!impl_) return;
  try {
    const detail::JobFailures::Waiting waiting(failure_->job());
    impl_->wait();
  } catch (const std::exception& e) {
    failure_->raise(fmt::format("{} failed: {}", what_, detail::text_of(e)));
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

/// An average or a fraction of integers would be rounded in silence, differently by each transport.
void check_arithmetic(const at::Tensor& t, ReduceOp op, double scale, const char* what) {
  if (c10::isIntegralType(t.scalar_type(), /*includeBool=*/true) && (op == ReduceOp::kAvg || scale != 1.0))
    throw ValueError(
        fmt::format("{}: {} elements are not averaged or scaled (scale {}): sum them, or convert to a "
                    "floating-point type first",
                    what, c10::toString(t.scalar_type()), scale));
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "average";
    case ReduceOp::kMin:
      return "minimum";
    case ReduceOp::kMax:
      return "maximum";
  }
  return "?";
}

std::string summary(const char* operation, int64_t elements, at::ScalarType dtype, std::string_view unit) {
  return fmt::format("{} of {} {} elements{}", operation, elements, c10::toString(dtype),
                     unit.empty() ? "" : fmt::format(", unit '{}'", unit));
}

void copy_unless_same(const at::Tensor& out, const at::Tensor& in) {
  if (out.numel() > 0 && out.data_ptr() != in.data_ptr()) out.copy_(in);
}

void scale_in_place(const at::Tensor& t, double scale) {
  if (scale != 1.0) t.mul_(scale);
}

}  // namespace

/// What must agree between ranks beside operation, dtype, unit and position; defaults where an operation has no such
/// thing.
struct Communicator::Detail {
  int64_t elements;  // 0 where the ranks' numbers differ by nature
  Counts counts = {};
  ReduceOp op = ReduceOp::kSum;
  double scale = 1.0;
  int64_t root = -1;

  uint64_t hash() const {
    uint64_t h = mix(mix(static_cast<uint64_t>(elements), static_cast<uint64_t>(op)), std::bit_cast<uint64_t>(scale));
    h = mix(h, static_cast<uint64_t>(root));
    for (auto n : counts) h = mix(h, static_cast<uint64_t>(n));
    return h;
  }

  std::string text() const {
    std::string s;
    if (root >= 0) s += fmt::format(", root {}", root);
    if (op != ReduceOp::kSum) s += fmt::format(", {}", name_of(op));
    if (scale != 1.0) s += fmt::format(", scale {}", scale);
    if (std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) != counts.end())
      s += fmt::format(", counts {}", fmt::join(counts, " "));
    return s;
  }
};

Communicator::Communicator(int64_t rank, int64_t size, c10::Device device, std::string axes,
                           std::chrono::milliseconds timeout, std::shared_ptr<detail::CommTrace> trace)
    : rank_(rank), size_(size), device_(device), axes_(std::move(axes)), timeout_(timeout), trace_(std::move(trace)) {
  if (!trace_) trace_ = std::make_shared<detail::CommTrace>(rank);
  failure_ = std::make_shared<detail::CommFailure>(trace_->failures());
  std::vector<int64_t> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  set_world_ranks(std::move(ranks));
}

void Communicator::set_world_ranks(std::vector<int64_t> ranks) {
  world_ranks_ = std::move(ranks);
  constexpr int64_t kListed = 8;
  where_ = size_ <= kListed ? fmt::format(" on mesh axis '{}' (ranks {})", axes_, fmt::join(world_ranks_, ", "))
                            : fmt::format(" on mesh axis '{}' ({} ranks)", axes_, size_);
}

void Communicator::fail(const std::string& why) noexcept {
  failure_->record(why);
  abort();
}

OpInfo Communicator::begin(const char* operation, int64_t elements, at::ScalarType dtype, std::string_view unit,
                           const Detail& detail) {
  auto what = describe(operation, elements, dtype, unit);
  check_usable(what);
  const auto position = sequence_++;
  uint64_t tag = mix(hash_text(operation), static_cast<uint64_t>(dtype));
  tag = mix(mix(mix(tag, detail.hash()), hash_text(unit)), position);
  OpInfo info{operation, elements, dtype, unit, tag, std::move(what)};
  // A fake transport moves nothing, so there is nothing to compare with.
  if (trace_->checks_ranks() && backend() != "fake") check_ranks(info, detail, position);
  if (!control_) trace_->record({axes_, operation, elements, std::string(unit), dtype});
  return info;
}

Work Communicator::submitted(WorkPtr work, OpInfo info) const {
  return Work(std::move(work), std::move(info.what), failure_);
}

std::string Communicator::describe(const char* operation, int64_t elements, at::ScalarType dtype,
                                   std::string_view unit) const {
  return fmt::format("rank {}: {}{}{}", trace_->failures()->rank(), summary(operation, elements, dtype, unit),
                     unit.empty() ? "" : ",", where_);
}

void Communicator::check_usable(const std::string& what) const {
  if (const auto why = failure_->text(); !why.empty())
    failure_->raise(fmt::format("{} was not started, because this communicator failed before: {}", what, why));
}

/// Every rank writes down what it is about to do; the exchange itself has a fixed size and order, so it works also when
/// the operations differ.
void Communicator::check_ranks(const OpInfo& info, const Detail& detail, uint64_t position) {
  constexpr int64_t kLength = 512;  // the tag, which decides, and as much of the text as fits
  auto mine = at::empty({kLength}, at::kByte).zero_();
  auto* bytes = mine.data_ptr<uint8_t>();
  const auto text = summary(info.operation, info.elements, info.dtype, info.unit) + detail.text();
  std::memcpy(bytes, &info.tag, sizeof(info.tag));
  std::copy_n(text.begin(), std::min<size_t>(text.size(), kLength - sizeof(info.tag) - 1), bytes + sizeof(info.tag));
  auto all = at::empty({kLength * size_}, at::TensorOptions().dtype(at::kByte).device(device_));
  const std::vector<int64_t> counts(static_cast<size_t>(size_), kLength);
  const OpInfo check{"rank check", kLength * size_, at::kByte, info.unit, mix(hash_text("fsdp rank check"), position),
                     info.what};
  submitted(do_all_gather(all, mine.to(device_), counts, check), check).wait();
  all = all.cpu();
  for (int64_t r = 0; r < size_; ++r) {
    const auto* other = all.data_ptr<uint8_t>() + r * kLength;
    if (std::memcmp(other, bytes, sizeof(info.tag)) != 0)
      failure_->raise(fmt::format(
          "rank {}: ranks of mesh axis '{}' submit different collectives: rank {} {}, rank {} {}. All ranks must run "
          "the same units in the same order",
          world_rank(rank_), axes_, world_rank(rank_), text, world_rank(r),
          reinterpret_cast<const char*>(other + sizeof(info.tag))));
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
  const auto info = begin("all_gather", out.numel(), out.scalar_type(), unit, {out.numel(), parts});
  return submitted(do_all_gather(out, in, parts, info), info);
}

Work Communicator::reduce_scatter(const at::Tensor& out, const at::Tensor& in, double scale, Counts counts,
                                  std::string_view unit) {
  check_tensor(out, "reduce_scatter", "out", device_);
  check_tensor(in, "reduce_scatter", "in", device_);
  check_dtypes(out, in, "reduce_scatter");
  check_arithmetic(in, ReduceOp::kSum, scale, "reduce_scatter");
  const auto parts = filled(counts, size_, in.numel(), "reduce_scatter");
  check_count(out, parts[rank_], "reduce_scatter", "out");
  if (size_ == 1) {
    c10::NoGradGuard no_grad;
    copy_unless_same(out, in);
    scale_in_place(out, scale);
    return {};
  }
  const auto info = begin("reduce_scatter", in.numel(), in.scalar_type(), unit,
                          {.elements = in.numel(), .counts = parts, .scale = scale});
  return submitted(do_reduce_scatter(out, in, scale, parts, info), info);
}

Work Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op, double scale, std::string_view unit) {
  check_tensor(tensor, "all_reduce", "tensor", device_);
  if ((op == ReduceOp::kMin || op == ReduceOp::kMax) && scale != 1.0)
    throw ValueError(fmt::format("all_reduce: a minimum or maximum is not scaled, got scale {}", scale));
  check_arithmetic(tensor, op, scale, "all_reduce");
  if (op == ReduceOp::kAvg) {
    op = ReduceOp::kSum;
    scale /= static_cast<double>(size_);
  }
  if (size_ == 1) {
    c10::NoGradGuard no_grad;
    scale_in_place(tensor, scale);
    return {};
  }
  const auto info = begin("all_reduce", tensor.numel(), tensor.scalar_type(), unit,
                          {.elements = tensor.numel(), .op = op, .scale = scale});
  return submitted(do_all_reduce(tensor, op, scale, info), info);
}

Work Communicator::broadcast(const at::Tensor& tensor, int64_t root, std::string_view unit) {
  check_tensor(tensor, "broadcast", "tensor", device_);
  if (root < 0 || root >= size_)
    throw ValueError(fmt::format("broadcast: root {} is not one of the {} ranks", root, size_));
  if (size_ == 1) return {};
  const auto info =
      begin("broadcast", tensor.numel(), tensor.scalar_type(), unit, {.elements = tensor.numel(), .root = root});
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
  const auto info = begin("all_to_all", std::max(out.numel(), in.numel()), in.scalar_type(), unit, {.elements = 0});
  return submitted(do_all_to_all(out, in, from, to, info), info);
}

void Communicator::barrier() {
  if (size_ == 1) return;
  auto what = fmt::format("rank {}: barrier{}", trace_->failures()->rank(), where_);
  check_usable(what);
  const OpInfo info{"barrier", 0, at::kByte, "", mix(hash_text("barrier"), sequence_++), std::move(what)};
  submitted(do_barrier(info), info).wait();
}

std::shared_ptr<Communicator> Communicator::split(int64_t color, int64_t key, std::string axes) {
  const auto what = fmt::format("rank {}: split{}", trace_->failures()->rank(), where_);
  check_usable(what);
  try {
    auto child = do_split(color, key, std::move(axes));
    if (control_) child->set_control();
    return child;
  } catch (const ValueError&) {
    throw;
  } catch (const std::exception& e) {
    failure_->raise(fmt::format("{} failed: {}", what, detail::text_of(e)));
  }
}

at::Tensor Communicator::empty(int64_t elements, at::ScalarType dtype) {
  return at::empty({elements}, at::TensorOptions().dtype(dtype).device(device_));
}

CommGroup::~CommGroup() noexcept(false) { comm_.group_end(); }

}  // namespace fsdp
