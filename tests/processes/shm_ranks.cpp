/// One rank of the jobs that shm_faults.py starts. Exit status: 0 done, 3 CommError (its text on standard output),
/// 4 wrong data, 5 anything else.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <string>

#include <fsdp/fsdp.h>
#include <torch/torch.h>

namespace {

using fsdp::Communicator;

struct WrongData {};

void check(const torch::Tensor& t, double expected) {
  if (t.numel() > 0 && (t.min().item<double>() != expected || t.max().item<double>() != expected)) throw WrongData{};
}

/// One of every operation, with values that tell rounds apart.
void one_of_each(Communicator& comm, int64_t round, int64_t elements) {
  const auto n = comm.size(), me = comm.rank();
  const auto value = [&](int64_t rank) { return static_cast<double>(round % 97 + rank); };
  const double sum = static_cast<double>(n) * static_cast<double>(round % 97) + static_cast<double>(n * (n - 1) / 2);
  auto all = torch::full({elements * n}, -1.0), mine = torch::full({elements}, value(me));
  comm.all_gather(all, mine).wait();
  for (int64_t r = 0; r < n; ++r) check(all.narrow(0, r * elements, elements), value(r));
  auto whole = torch::full({elements * n}, value(me));
  comm.reduce_scatter(mine, whole).wait();
  check(mine, sum);
  comm.all_reduce(whole).wait();
  check(whole, sum);
  comm.broadcast(mine.fill_(value(me)), round % n).wait();
  check(mine, value(round % n));
  comm.barrier();
}

void loop(Communicator& comm, double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  auto go_on = torch::ones({1});
  int64_t rounds = 0;
  while (true) {
    for (int64_t elements : {1, 300, 70'000}) one_of_each(comm, rounds, elements);
    if (++rounds == 1) std::cout << "running" << std::endl;
    const auto elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    go_on.fill_(elapsed < seconds ? 1.0 : 0.0);
    comm.broadcast(go_on, 0).wait();
    if (go_on.item<double>() == 0.0) break;
  }
  std::cout << "rounds " << rounds << std::endl;
}

/// A child that this rank forks must be refused, and change nothing for the ranks, not at its end either.
void fork_child(Communicator& comm) {
  one_of_each(comm, 0, 1'000);
  const auto child = fork();
  if (child == 0) {
    int status = 1;
    try {
      comm.all_reduce(torch::ones({1})).wait();
    } catch (const fsdp::CommError& e) {
      status = std::string(e.what()).find("forked") == std::string::npos ? 2 : 0;
    }
    _exit(status);
  }
  int status = -1;
  waitpid(child, &status, 0);
  std::cout << "child " << status << std::endl;
  for (int64_t i = 0; i < 10; ++i) one_of_each(comm, i, 1'000);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    fsdp::WorldOptions options;
    options.timeout = std::chrono::seconds(argc > 3 ? std::stoll(argv[3]) : 60);
    const auto world = fsdp::init_world(options);
    const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"dp"});
    auto& comm = mesh.communicator(0);
    std::cout << "backend " << comm.backend() << std::endl;
    if (mode == "loop") loop(comm, std::stod(argv[2]));
    if (mode == "fork") fork_child(comm);
    comm.barrier();
    world->barrier();
    return 0;
  } catch (const fsdp::CommError& e) {
    std::cout << "CommError " << e.what() << std::endl;
    return 3;
  } catch (const WrongData&) {
    std::cout << "wrong data" << std::endl;
    return 4;
  } catch (const std::exception& e) {
    std::cout << "exception " << e.what() << std::endl;
    return 5;
  }
}
