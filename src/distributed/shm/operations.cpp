#include "distributed/shm/operations.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>

#include "distributed/shm/copy.h"
#include "distributed/shm/reduce.h"

namespace fsdp::detail::shm {
namespace {

/// Of parts within a slot: whole elements of any type, and no cache line shared.
constexpr size_t kAlign = 64;

struct Bytes {
  size_t begin, size;
};

/// The bytes of each rank's part in a buffer.
std::vector<Bytes> parts_of(Counts counts, size_t element) {
  std::vector<Bytes> parts;
  size_t begin = 0;
  for (auto c : counts) {
    parts.push_back({begin, static_cast<size_t>(c) * element});
    begin += parts.back().size;
  }
  return parts;
}

/// What a round moves of a part when each moves `step` bytes.
Bytes piece(const Bytes& part, uint32_t round, size_t step) {
  const size_t done = std::min(part.size, round * step);
  return {part.begin + done, std::min(step, part.size - done)};
}

uint32_t rounds_for(size_t bytes, size_t step) {
  return static_cast<uint32_t>(std::max<size_t>(1, (bytes + step - 1) / step));
}

size_t largest(const std::vector<Bytes>& parts) {
  size_t most = 0;
  for (const auto& p : parts) most = std::max(most, p.size);
  return most;
}

/// Results larger than this do not stay in a core's cache anyway.
constexpr size_t kLarge = 8 << 20;

/// To a result of `whole` bytes.
void deliver(std::byte* to, const std::byte* from, size_t bytes, size_t whole) {
  whole >= kLarge ? stream_bytes(to, from, bytes) : copy_bytes(to, from, bytes);
}

std::byte* data(const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); }

class AllGather final : public Operation {
 public:
  AllGather(Place place, const at::Tensor& out, const at::Tensor& in, Counts counts, const OpInfo& info)
      : AllGather(place, out, in, parts_of(counts, out.element_size()), info) {}

  void put(uint32_t round, std::byte* slot) override {
    const auto mine = piece(parts_[place_.rank], round, kSlotBytes);
    const auto* from = data(in_) + (mine.begin - parts_[place_.rank].begin);
    stream_bytes(slot, from, mine.size);
    deliver(data(out_) + mine.begin, from, mine.size, out_.nbytes());  // while it is in the cache
  }

  void get(uint32_t round, const Segment& segment, uint32_t slot_round) override {
    for (int64_t r = 0; r < place_.ranks; ++r) {
      if (r == place_.rank) continue;
      const auto part = piece(parts_[r], round, kSlotBytes);
      deliver(data(out_) + part.begin, segment.slot(r, slot_round), part.size, out_.nbytes());
    }
  }

 private:
  AllGather(Place place, const at::Tensor& out, const at::Tensor& in, std::vector<Bytes> parts, const OpInfo& info)
      : Operation(info, rounds_for(largest(parts), kSlotBytes)),
        place_(place),
        out_(out),
        in_(in),
        parts_(std::move(parts)) {}

  Place place_;
  at::Tensor out_, in_;
  std::vector<Bytes> parts_;
};

/// A slot divided among the peers.
struct Division {
  Place place;
  size_t step;  // bytes for each

  explicit Division(Place p, size_t room = kSlotBytes)
      : place(p), step(room / static_cast<size_t>(p.ranks - 1) / kAlign * kAlign) {}
  /// Where rank `from` leaves what is for rank `to`.
  size_t offset(int64_t from, int64_t to) const { return static_cast<size_t>(to < from ? to : to - 1) * step; }
};

class ReduceScatter final : public Operation {
 public:
  ReduceScatter(Place place, const at::Tensor& out, const at::Tensor& in, double scale, Counts counts,
                const OpInfo& info)
      : ReduceScatter(Division(place), out, in, scale, parts_of(counts, in.element_size()), info) {}

  void put(uint32_t round, std::byte* slot) override {
    const auto me = division_.place.rank;
    for (int64_t r = 0; r < division_.place.ranks; ++r) {
      if (r == me) continue;
      const auto part = piece(parts_[r], round, division_.step);
      stream_bytes(slot + division_.offset(me, r), data(in_) + part.begin, part.size);
    }
  }

  void get(uint32_t round, const Segment& segment, uint32_t slot_round) override {
    const auto me = division_.place.rank;
    const auto part = piece(parts_[me], round, division_.step);
    if (part.size == 0) return;
    for (int64_t r = 0; r < division_.place.ranks; ++r)
      sources_[r] = r == me ? data(in_) + part.begin : segment.slot(r, slot_round) + division_.offset(r, me);
    reduce(in_.scalar_type(), ReduceOp::kSum, scale_, sources_, data(out_) + (part.begin - parts_[me].begin),
           part.size / in_.element_size());
  }

 private:
  ReduceScatter(Division division, const at::Tensor& out, const at::Tensor& in, double scale, std::vector<Bytes> parts,
                const OpInfo& info)
      : Operation(info, rounds_for(largest(parts), division.step)),
        division_(division),
        out_(out),
        in_(in),
        scale_(scale),
        parts_(std::move(parts)),
        sources_(parts_.size()) {}

  Division division_;
  at::Tensor out_, in_;
  double scale_;
  std::vector<Bytes> parts_;
  std::vector<const std::byte*> sources_;
};

/// Everybody reads and reduces everything: one round. For few bytes, where a second round costs more than the work.
class SmallAllReduce final : public Operation {
 public:
  SmallAllReduce(Place place, const at::Tensor& tensor, ReduceOp op, double scale, const OpInfo& info)
      : Operation(info, 1),
        place_(place),
        tensor_(tensor),
        op_(op),
        scale_(scale),
        sources_(static_cast<size_t>(place.ranks)) {}

  void put(uint32_t, std::byte* slot) override { stream_bytes(slot, data(tensor_), tensor_.nbytes()); }

  void get(uint32_t, const Segment& segment, uint32_t slot_round) override {
    if (tensor_.numel() == 0) return;
    for (int64_t r = 0; r < place_.ranks; ++r)
      sources_[r] = r == place_.rank ? data(tensor_) : segment.slot(r, slot_round);
    reduce(tensor_.scalar_type(), op_, scale_, sources_, data(tensor_), static_cast<size_t>(tensor_.numel()));
  }

 private:
  Place place_;
  at::Tensor tensor_;
  ReduceOp op_;
  double scale_;
  std::vector<const std::byte*> sources_;
};

/// The tensor is cut into blocks dealt to the ranks in turn, `ranks` blocks a round. In round i ranks put the blocks i
/// of the others, and their own reduced block i - 1, where no contribution has its place; then they reduce their own
/// block i and get the others' reduced blocks i - 1. Each block is reduced by one rank: equal bits everywhere.
class AllReduce final : public Operation {
 public:
  AllReduce(Place place, const at::Tensor& tensor, ReduceOp op, double scale, const OpInfo& info)
      : AllReduce(place, tensor, op, scale, info, block_bytes(place, tensor.nbytes())) {}

  uint32_t ahead() const override { return 1; }  // a put needs what the get before it reduced

  void put(uint32_t round, std::byte* slot) override {
    for (int64_t r = 0; r < place_.ranks; ++r) {
      const auto from = r == place_.rank ? block(static_cast<int64_t>(round) - 1, r) : block(round, r);
      stream_bytes(slot + static_cast<size_t>(r) * step_, data(tensor_) + from.begin, from.size);
    }
  }

  void get(uint32_t round, const Segment& segment, uint32_t slot_round) override {
    for (int64_t r = 0; r < place_.ranks; ++r) {
      sources_[r] = segment.slot(r, slot_round) + static_cast<size_t>(place_.rank) * step_;
      if (r == place_.rank) continue;
      const auto to = block(static_cast<int64_t>(round) - 1, r);
      deliver(data(tensor_) + to.begin, segment.slot(r, slot_round) + static_cast<size_t>(r) * step_, to.size,
              tensor_.nbytes());
    }
    const auto mine = block(round, place_.rank);
    if (mine.size == 0) return;
    auto* own = data(tensor_) + mine.begin;
    sources_[place_.rank] = own;
    reduce(tensor_.scalar_type(), op_, scale_, sources_, own, mine.size / tensor_.element_size());
  }

 private:
  AllReduce(Place place, const at::Tensor& tensor, ReduceOp op, double scale, const OpInfo& info, size_t step)
      : Operation(info, rounds_for(tensor.nbytes(), step * static_cast<size_t>(place.ranks)) + 1),
        place_(place),
        tensor_(tensor),
        op_(op),
        scale_(scale),
        step_(step),
        sources_(static_cast<size_t>(place.ranks)) {}

  static size_t block_bytes(Place place, size_t bytes) {
    const auto ranks = static_cast<size_t>(place.ranks);
    const size_t even = ((bytes + ranks - 1) / ranks + kAlign - 1) / kAlign * kAlign;
    return std::min(kSlotBytes / ranks / kAlign * kAlign, even);
  }

  /// Empty before the first and after the last.
  Bytes block(int64_t round, int64_t rank) const {
    if (round < 0) return {0, 0};
    const size_t total = tensor_.nbytes();
    const size_t begin = std::min(total, static_cast<size_t>(round * place_.ranks + rank) * step_);
    return {begin, std::min(step_, total - begin)};
  }

  Place place_;
  at::Tensor tensor_;
  ReduceOp op_;
  double scale_;
  size_t step_;
  std::vector<const std::byte*> sources_;
};

class Broadcast final : public Operation {
 public:
  Broadcast(Place place, const at::Tensor& tensor, int64_t root, const OpInfo& info)
      : Operation(info, rounds_for(tensor.nbytes(), kSlotBytes)), place_(place), tensor_(tensor), root_(root) {}

  void put(uint32_t round, std::byte* slot) override {
    if (place_.rank != root_) return;
    const auto p = piece({0, tensor_.nbytes()}, round, kSlotBytes);
    stream_bytes(slot, data(tensor_) + p.begin, p.size);
  }

  void get(uint32_t round, const Segment& segment, uint32_t slot_round) override {
    if (place_.rank == root_) return;
    const auto p = piece({0, tensor_.nbytes()}, round, kSlotBytes);
    deliver(data(tensor_) + p.begin, segment.slot(root_, slot_round), p.size, tensor_.nbytes());
  }

 private:
  Place place_;
  at::Tensor tensor_;
  int64_t root_;
};

/// Ranks know only their own counts: a slot begins with what its rank sends to each, and the others check it.
class AllToAll final : public Operation {
 public:
  AllToAll(Place place, const at::Tensor& out, const at::Tensor& in, Counts out_counts, Counts in_counts,
           const OpInfo& info)
      : AllToAll(Division(place, kSlotBytes - head_bytes(place)), out, in, parts_of(out_counts, out.element_size()),
                 parts_of(in_counts, in.element_size()), info) {}

  void put(uint32_t round, std::byte* slot) override {
    const auto me = division_.place.rank;
    auto* sizes = reinterpret_cast<size_t*>(slot);
    for (int64_t r = 0; r < division_.place.ranks; ++r) {
      sizes[r] = to_[r].size;
      if (r == me) continue;
      const auto part = piece(to_[r], round, division_.step);
      stream_bytes(slot + head_bytes(division_.place) + division_.offset(me, r), data(in_) + part.begin, part.size);
    }
  }

  void get(uint32_t round, const Segment& segment, uint32_t slot_round) override {
    const auto me = division_.place.rank;
    if (round == 0) check_sizes(segment, slot_round);
    for (int64_t r = 0; r < division_.place.ranks; ++r) {
      if (r == me) continue;
      const auto part = piece(from_[r], round, division_.step);
      copy_bytes(data(out_) + part.begin,
                 segment.slot(r, slot_round) + head_bytes(division_.place) + division_.offset(r, me), part.size);
    }
    if (round == 0) copy_bytes(data(out_) + from_[me].begin, data(in_) + to_[me].begin, to_[me].size);
  }

 private:
  AllToAll(Division division, const at::Tensor& out, const at::Tensor& in, std::vector<Bytes> from,
           std::vector<Bytes> to, const OpInfo& info)
      : Operation(info, rounds_for(largest(to), division.step)),
        division_(division),
        out_(out),
        in_(in),
        from_(std::move(from)),
        to_(std::move(to)) {}

  static size_t head_bytes(Place place) {
    return (static_cast<size_t>(place.ranks) * sizeof(size_t) + kAlign - 1) / kAlign * kAlign;
  }

  void check_sizes(const Segment& segment, uint32_t slot_round) const {
    for (int64_t r = 0; r < division_.place.ranks; ++r) {
      const auto sent = reinterpret_cast<const size_t*>(segment.slot(r, slot_round))[division_.place.rank];
      if (sent != from_[r].size)
        throw std::runtime_error(fmt::format("rank {} sends {} bytes to rank {}, which expects {}", r, sent,
                                             division_.place.rank, from_[r].size));
    }
  }

  Division division_;
  at::Tensor out_, in_;
  std::vector<Bytes> from_, to_;
};

class Barrier final : public Operation {
 public:
  explicit Barrier(const OpInfo& info) : Operation(info, 1) {}
  void put(uint32_t, std::byte*) override {}
  void get(uint32_t, const Segment&, uint32_t) override {}
};

void check_reducible(const at::Tensor& t, const char* what) {
  if (!reducible(t.scalar_type()))
    throw ValueError(fmt::format("{}: no sum of {} elements; expected a floating type, an integer type or bool", what,
                                 c10::toString(t.scalar_type())));
}

}  // namespace

std::unique_ptr<Operation> all_gather(Place place, const at::Tensor& out, const at::Tensor& in, Counts counts,
                                      const OpInfo& info) {
  return std::make_unique<AllGather>(place, out, in, counts, info);
}

std::unique_ptr<Operation> reduce_scatter(Place place, const at::Tensor& out, const at::Tensor& in, double scale,
                                          Counts counts, const OpInfo& info) {
  check_reducible(in, info.operation);
  return std::make_unique<ReduceScatter>(place, out, in, scale, counts, info);
}

std::unique_ptr<Operation> all_reduce(Place place, const at::Tensor& tensor, ReduceOp op, double scale,
                                      const OpInfo& info) {
  check_reducible(tensor, info.operation);
  constexpr size_t kSmall = 16 * 1024;
  if (tensor.nbytes() <= kSmall) return std::make_unique<SmallAllReduce>(place, tensor, op, scale, info);
  return std::make_unique<AllReduce>(place, tensor, op, scale, info);
}

std::unique_ptr<Operation> broadcast(Place place, const at::Tensor& tensor, int64_t root, const OpInfo& info) {
  return std::make_unique<Broadcast>(place, tensor, root, info);
}

std::unique_ptr<Operation> all_to_all(Place place, const at::Tensor& out, const at::Tensor& in, Counts out_counts,
                                      Counts in_counts, const OpInfo& info) {
  return std::make_unique<AllToAll>(place, out, in, out_counts, in_counts, info);
}

std::unique_ptr<Operation> barrier(const OpInfo& info) { return std::make_unique<Barrier>(info); }

}  // namespace fsdp::detail::shm
