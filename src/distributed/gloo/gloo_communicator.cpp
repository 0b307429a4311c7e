/// Collectives over gloo's point-to-point messages. Its own reduce-scatter is a whole all-reduce, and its collectives
/// blend whatever arrives; a message here carries a tag made of operation, size, dtype, unit and position, so ranks
/// that disagree time out with an error instead of mixing data. Parts are sent from and received into the caller's
/// buffers.
#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "distributed/backend.h"
#include "distributed/worker.h"

namespace fsdp::detail {
namespace {

using c10d::ProcessGroupGloo;

/// Sums of low precision are kept in fp32: rounding each of n additions would make the result depend on n.
at::ScalarType accumulation_type(at::ScalarType t) { return t == at::kHalf || t == at::kBFloat16 ? at::kFloat : t; }

/// As in Python: GLOO_SOCKET_IFNAME names the interfaces (separated by commas) that connections use.
std::vector<std::shared_ptr<::gloo::transport::Device>> devices(bool single_host) {
  std::vector<std::shared_ptr<::gloo::transport::Device>> result;
  if (const char* names = std::getenv("GLOO_SOCKET_IFNAME"); names && *names) {
    std::istringstream list(names);
    for (std::string name; std::getline(list, name, ',');)
      result.push_back(ProcessGroupGloo::createDeviceForInterface(name));
    return result;
  }
  result.push_back(single_host ? ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                               : ProcessGroupGloo::createDefaultDevice());
  return result;
}

class GlooCommunicator final : public Communicator {
 public:
  explicit GlooCommunicator(CommSetup s)
      : Communicator(s.rank, s.size, s.device, s.axes, s.timeout, s.trace),
        setup_(std::move(s)),
        worker_(timeout(), failure()) {
    auto options = ProcessGroupGloo::Options::create(timeout());
    options->threads = 1;  // for gloo's own collectives, which are not used
    options->devices = devices(setup_.single_host);
    group_ = c10::make_intrusive<ProcessGroupGloo>(setup_.store, static_cast<int>(rank()), static_cast<int>(size()),
                                                   options);
  }

  ~GlooCommunicator() override {
    // What still runs would wait for peers that may be gone.
    if (!worker_.idle()) abort();
  }

  std::string_view backend() const override { return "gloo"; }

  void abort() noexcept override {
    failure()->record("aborted");
    worker_.fail(failure()->text());
    try {
      // Only the waits: closing connections under the worker thread is a race inside gloo.
      std::lock_guard lock(waiting_mutex_);
      aborted_ = true;
      for (auto& work : waiting_) work->abort();
    } catch (const std::exception&) {
      // Waking what has ended already.
    }
  }

 protected:
  WorkPtr do_all_gather(const at::Tensor& out, const at::Tensor& in, Counts counts, const OpInfo& info) override {
    return submit(info, [this, out, in, parts = parts_of(out, counts), tag = tag_of(info)](Deadline deadline) {
      auto mine = parts[rank()];
      if (mine.numel() > 0 && mine.data_ptr() != in.data_ptr()) mine.copy_(in);
      exchange(std::vector<at::Tensor>(parts.size(), mine), parts, tag, deadline);
    });
  }

  WorkPtr do_reduce_scatter(const at::Tensor& out, const at::Tensor& in, double scale, Counts counts,
                            const OpInfo& info) override {
    return submit(info, [this, out, in, scale, parts = parts_of(in, counts), tag = tag_of(info)](Deadline deadline) {
      auto contributions = gather_contributions(parts, tag, deadline);
      contributions[rank()] = parts[rank()];
      reduce_into(out, contributions, ReduceOp::kSum, scale);
    });
  }

  WorkPtr do_all_reduce(const at::Tensor& tensor, ReduceOp op, double scale, const OpInfo& info) override {
    const int64_t n = tensor.numel(), each = (n + size() - 1) / size();
    std::vector<int64_t> counts;
    for (int64_t r = 0; r < size(); ++r) counts.push_back(std::clamp<int64_t>(n - r * each, 0, each));
    return submit(info,
                  [this, tensor, op, scale, parts = parts_of(tensor, counts), tag = tag_of(info)](Deadline deadline) {
                    // Each rank reduces one part, in rank order, and hands the result round: equal bits everywhere.
                    auto contributions = gather_contributions(parts, tag, deadline);
                    contributions[rank()] = parts[rank()];
                    reduce_into(parts[rank()], contributions, op, scale);
                    exchange(std::vector<at::Tensor>(parts.size(), parts[rank()]), parts, tag ^ 1u, deadline);
                  });
  }

  WorkPtr do_broadcast(const at::Tensor& tensor, int64_t root, const OpInfo& info) override {
    return submit(info, [this, tensor, root, tag = tag_of(info)](Deadline deadline) {
      const auto nothing = tensor.narrow(0, 0, 0);
      std::vector<at::Tensor> to(static_cast<size_t>(size()), nothing), from = to;
      if (rank() == root)
        std::fill(to.begin(), to.end(), tensor);
      else
        from[root] = tensor;
      exchange(to, from, tag, deadline);
    });
  }

  WorkPtr do_all_to_all(const at::Tensor& out, const at::Tensor& in, Counts out_counts, Counts in_counts,
                        const OpInfo& info) override {
    return submit(info, [this, from = parts_of(out, out_counts), to = parts_of(in, in_counts),
                         tag = tag_of(info)](Deadline deadline) {
      if (to[rank()].numel() > 0) from[rank()].copy_(to[rank()]);
      exchange(to, from, tag, deadline);
    });
  }

  WorkPtr do_barrier(const OpInfo& info) override {
    return submit(info, [this, tag = tag_of(info)](Deadline deadline) {
      auto mine = at::empty({1}, at::kByte).zero_();
      std::vector<at::Tensor> from;
      for (int64_t r = 0; r < size(); ++r) from.push_back(at::empty({1}, at::kByte));
      exchange(std::vector<at::Tensor>(from.size(), mine), from, tag, deadline);
    });
  }

  std::shared_ptr<Communicator> do_split(int64_t color, int64_t key, std::string axes) override {
    return make_communicator("gloo", split_setup(setup_, splits_++, color, key, std::move(axes)));
  }

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  template <class F>
  WorkPtr submit(const OpInfo& info, F operation) {
    return worker_.submit(info.what, [this, operation = std::move(operation)] {
      c10::NoGradGuard no_grad;
      // One for all peers and rounds of the operation.
      operation(std::chrono::steady_clock::now() + timeout());
    });
  }

  /// Even, so that an operation of two rounds can use tag and tag ^ 1.
  static uint32_t tag_of(const OpInfo& info) { return static_cast<uint32_t>(info.tag >> 33) & ~1u; }

  static std::vector<at::Tensor> parts_of(const at::Tensor& flat, Counts counts) {
    std::vector<at::Tensor> parts;
    int64_t at = 0;
    for (auto n : counts) {
      parts.push_back(flat.narrow(0, at, n));
      at += n;
    }
    return parts;
  }

  /// Sends to[r] to rank r and receives from[r] from it, all at once. Empty parts are not sent: both sides know counts.
  void exchange(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from, uint32_t tag,
                Deadline deadline) {
    std::vector<c10::intrusive_ptr<c10d::Work>> receives, sends;
    std::vector<int64_t> sources, targets;
    // Starting with the next rank spreads the load: not everybody sends to rank 0 first.
    for (int64_t k = 1; k < size(); ++k) {
      const int64_t r = (rank() + size() - k) % size();
      if (from[r].numel() == 0) continue;
      naming(kReceive, r, deadline, [&] {
        std::vector<at::Tensor> t{from[r]};
        receives.push_back(group_->recv(t, static_cast<int>(r), static_cast<int>(tag)));
      });
      sources.push_back(r);
    }
    for (int64_t k = 1; k < size(); ++k) {
      const int64_t r = (rank() + k) % size();
      if (to[r].numel() == 0) continue;
      naming(kSend, r, deadline, [&] {
        std::vector<at::Tensor> t{to[r]};
        sends.push_back(group_->send(t, static_cast<int>(r), static_cast<int>(tag)));
      });
      targets.push_back(r);
    }
    {
      std::lock_guard lock(waiting_mutex_);
      if (aborted_) throw std::runtime_error(failure()->text());
      waiting_ = receives;
      waiting_.insert(waiting_.end(), sends.begin(), sends.end());
    }
    const Forget forget{*this};
    try {
      for (size_t i = 0; i < receives.size(); ++i) wait(*receives[i], kReceive, sources[i], deadline);
      for (size_t i = 0; i < sends.size(); ++i) wait(*sends[i], kSend, targets[i], deadline);
    } catch (const std::exception&) {
      unfinished_.insert(unfinished_.end(), from.begin(), from.end());
      unfinished_.insert(unfinished_.end(), to.begin(), to.end());
      throw;
    }
  }

  /// An aborted wait must not be woken after its work is gone.
  struct Forget {
    GlooCommunicator& owner;
    ~Forget() {
      std::lock_guard lock(owner.waiting_mutex_);
      owner.waiting_.clear();
    }
  };

  static constexpr const char* kReceive = "receive from";
  static constexpr const char* kSend = "send to";

  /// Runs `f`, which talks to member `peer`; what it throws names that rank.
  template <class F>
  void naming(const char* action, int64_t peer, Deadline deadline, F&& f) {
    worker_.doing(action, world_rank(peer));
    try {
      f();
    } catch (const std::exception& e) {
      if (aborted_) throw std::runtime_error(failure()->text());
      if (std::chrono::steady_clock::now() >= deadline)
        throw std::runtime_error(
            fmt::format("could not {} rank {} within {} ms (it stopped, is late, or runs another collective; "
                        "FSDP_DEBUG=1 says which)",
                        action, world_rank(peer), timeout().count()));
      throw std::runtime_error(
          fmt::format("could not {} rank {}: the connection is lost, because its process ended or gave up ({})", action,
                      world_rank(peer), text_of(e)));
    }
  }

  void wait(c10d::Work& work, const char* action, int64_t peer, Deadline deadline) {
    naming(action, peer, deadline, [&] {
      // gloo takes 0 for its default timeout.
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      if (!work.wait(std::max(left, std::chrono::milliseconds(1)))) throw std::runtime_error("aborted");
    });
  }

  std::vector<at::Tensor> gather_contributions(const std::vector<at::Tensor>& parts, uint32_t tag, Deadline deadline) {
    std::vector<at::Tensor> received;
    for (int64_t r = 0; r < size(); ++r)
      received.push_back(at::empty({r == rank() ? 0 : parts[rank()].numel()}, parts[rank()].options()));
    exchange(parts, received, tag, deadline);
    return received;
  }

  static void reduce_into(const at::Tensor& out, const std::vector<at::Tensor>& contributions, ReduceOp op,
                          double scale) {
    if (out.numel() == 0) return;
    const auto type = accumulation_type(out.scalar_type());
    at::Tensor sum = contributions[0].to(type, /*non_blocking=*/false, /*copy=*/true);
    for (size_t r = 1; r < contributions.size(); ++r) {
      if (op == ReduceOp::kMin)
        sum = at::minimum(sum, contributions[r]);
      else if (op == ReduceOp::kMax)
        sum = at::maximum(sum, contributions[r]);
      else
        sum.add_(contributions[r]);
    }
    if (scale != 1.0) sum.mul_(scale);
    out.copy_(sum);
  }

  const CommSetup setup_;
  // Of a failed operation: gloo's own thread reads and writes them until group_, which goes first, has closed its
  // connections.
  std::vector<at::Tensor> unfinished_;
  c10::intrusive_ptr<ProcessGroupGloo> group_;
  std::atomic<bool> aborted_ = false;
  std::mutex waiting_mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> waiting_;  // what the worker thread waits for now
  int64_t splits_ = 0;
  CommWorker worker_;  // goes first: its thread uses this object until it has joined
};

}  // namespace

std::shared_ptr<Communicator> make_gloo_communicator(CommSetup setup) {
  return std::make_shared<GlooCommunicator>(std::move(setup));
}

}  // namespace fsdp::detail
