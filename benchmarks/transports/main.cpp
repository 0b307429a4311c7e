/// Times each transport's collectives next to a plain copy of the same bytes, in one run:
///
///   scripts/launch.sh 2 bench_transports        ranks as processes
///   bench_transports --threads 4                ranks as threads
///
/// `memcpy` copies the buffer from one private memory to another, on all ranks at once. Buffer: gather output, scatter
/// input, reduced or sent tensor. A cell is the slowest rank's mean over back-to-back operations, the least of several
/// repeats, the repeats of all cells interleaved. Rank 0 prints a table, or with --json one object.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <fsdp/fsdp.h>
#include <torch/torch.h>

namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int64_t threads = 0;
  bool json = false;
  std::string transports = "shm,gloo";
  std::string dtype = "float";
  int64_t largest = 64 << 20;
  int repeats = 5;
  double seconds = 0.03;  // of one repeat of one cell
};

struct Cell {
  std::string transport, operation;
  int64_t bytes;
  std::function<void()> run;
  double least = 1e30;  // microseconds
};

/// The slowest rank's mean time of one run, in microseconds.
double measure(fsdp::Communicator& clock, const std::function<void()>& run, double seconds) {
  const auto slowest = [&](double value) {
    auto t = torch::full({1}, value, torch::kDouble);
    clock.all_reduce(t, fsdp::ReduceOp::kMax).wait();
    return t.item<double>();
  };
  const auto loop = [&](int64_t n) {
    clock.barrier();
    const auto begin = Clock::now();
    for (int64_t i = 0; i < n; ++i) run();
    return std::chrono::duration<double>(Clock::now() - begin).count() / static_cast<double>(n);
  };
  const auto once = std::max(1e-7, slowest(loop(2)));
  const auto n = std::clamp<int64_t>(static_cast<int64_t>(seconds / once), 2, 20'000);
  return slowest(loop(n)) * 1e6;
}

/// Tensors of one size: kept while its cells run, so that no cell pays for fresh pages.
std::vector<Cell> cells_of(int64_t bytes, torch::ScalarType type,
                           const std::vector<std::pair<std::string, fsdp::Communicator*>>& transports) {
  std::vector<Cell> cells;
  const auto elements = bytes / static_cast<int64_t>(c10::elementSize(type));
  const auto ranks = transports.front().second->size();
  auto whole = torch::ones({elements}, type), other = torch::ones({elements}, type);
  auto part = torch::ones({elements / ranks}, type);
  cells.push_back({"memcpy", "copy", bytes, [=] { std::memcpy(other.data_ptr(), whole.data_ptr(), whole.nbytes()); }});
  for (const auto& [name, comm] : transports) {
    cells.push_back({name, "all_gather", bytes, [=, c = comm] { c->all_gather(whole, part).wait(); }});
    cells.push_back({name, "reduce_scatter", bytes, [=, c = comm] { c->reduce_scatter(part, whole, 0.5).wait(); }});
    const double half = 1.0 / static_cast<double>(ranks);
    cells.push_back(
        {name, "all_reduce", bytes, [=, c = comm] { c->all_reduce(whole, fsdp::ReduceOp::kSum, half).wait(); }});
    cells.push_back({name, "broadcast", bytes, [=, c = comm] { c->broadcast(whole, 0).wait(); }});
  }
  return cells;
}

void print_text(const std::vector<Cell>& cells, int64_t ranks, const std::string& dtype) {
  std::printf("%ld ranks, %s; microseconds (speed relative to memcpy)\n%-10s %-15s %12s %12s\n", ranks, dtype.c_str(),
              "transport", "operation", "KiB", "us");
  double copy = 0;
  for (const auto& c : cells) {
    if (c.transport == "memcpy") copy = c.least;
    std::printf("%-10s %-15s %12ld %12.1f (%.2f)\n", c.transport.c_str(), c.operation.c_str(), c.bytes >> 10, c.least,
                copy / c.least);
  }
}

void print_json(const std::vector<Cell>& cells, int64_t ranks, bool threads, const std::string& dtype) {
  std::ostringstream out;
  out << "{\"ranks\": " << ranks << ", \"mode\": \"" << (threads ? "threads" : "processes") << "\", \"dtype\": \""
      << dtype << "\", \"cells\": [";
  for (size_t i = 0; i < cells.size(); ++i)
    out << (i ? ", " : "") << "{\"transport\": \"" << cells[i].transport << "\", \"operation\": \""
        << cells[i].operation << "\", \"bytes\": " << cells[i].bytes << ", \"microseconds\": " << cells[i].least << "}";
  std::cout << out.str() << "]}" << std::endl;
}

void run_rank(const Options& o, const std::vector<std::shared_ptr<fsdp::World>>& worlds,
              const std::vector<std::string>& names) {
  std::vector<fsdp::DeviceMesh> meshes;
  std::vector<std::pair<std::string, fsdp::Communicator*>> transports;
  for (size_t i = 0; i < worlds.size(); ++i) {
    meshes.push_back(fsdp::init_device_mesh(worlds[i], {worlds[i]->size()}, {"dp"}));
    transports.emplace_back(names[i], &meshes.back().communicator(0));
  }
  auto& clock = *transports.front().second;
  const auto type = o.dtype == "bf16" ? torch::kBFloat16 : torch::kFloat;
  std::vector<Cell> all;
  for (int64_t bytes : {int64_t{4} << 10, int64_t{64} << 10, int64_t{1} << 20, int64_t{16} << 20, int64_t{64} << 20}) {
    if (bytes > o.largest) break;
    auto cells = cells_of(bytes, type, transports);
    for (int repeat = 0; repeat < o.repeats; ++repeat)
      for (auto& c : cells) c.least = std::min(c.least, measure(clock, c.run, o.seconds));
    for (auto& c : cells) {
      c.run = nullptr;
      all.push_back(c);
    }
  }
  if (worlds.front()->rank() != 0) return;
  o.json ? print_json(all, worlds.front()->size(), o.threads > 0, o.dtype)
         : print_text(all, worlds.front()->size(), o.dtype);
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&] {
      if (++i == argc) throw fsdp::ValueError(name + " needs a value");
      return std::string(argv[i]);
    };
    if (name == "--threads")
      o.threads = std::stoll(value());
    else if (name == "--json")
      o.json = true;
    else if (name == "--transports")
      o.transports = value();
    else if (name == "--dtype")
      o.dtype = value();
    else if (name == "--largest")
      o.largest = std::stoll(value());
    else if (name == "--repeats")
      o.repeats = std::stoi(value());
    else
      throw fsdp::ValueError("unknown option " + name +
                             "; there are --threads N, --json, --transports shm,gloo, --dtype float|bf16, "
                             "--largest BYTES, --repeats N");
  }
  if (o.dtype != "float" && o.dtype != "bf16") throw fsdp::ValueError("--dtype: expected float or bf16");
  return o;
}

}  // namespace

int main(int argc, char** argv) try {
  const auto o = parse(argc, argv);
  at::set_num_threads(1);
  std::vector<std::string> names;
  std::istringstream list(o.transports);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  if (names.empty()) throw fsdp::ValueError("--transports is empty");
  const auto options_for = [](const std::string& backend) {
    fsdp::WorldOptions options;
    options.backend = backend;
    return options;
  };
  std::vector<std::shared_ptr<fsdp::World>> worlds;
  if (o.threads > 0) {
    // The ranks of one call share one backend.
    for (const auto& name : names)
      fsdp::run_threads(
          o.threads, [&](std::shared_ptr<fsdp::World> world) { run_rank(o, {world}, {name}); }, options_for(name));
    return 0;
  }
  for (const auto& name : names) worlds.push_back(fsdp::init_world(options_for(name)));
  run_rank(o, worlds, names);
  worlds.front()->barrier();
  return 0;
} catch (const std::exception& e) {
  std::cerr << e.what() << "\n";
  return 1;
}
