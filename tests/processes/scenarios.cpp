#include "processes/scenarios.h"

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <thread>

#include <sys/resource.h>
#include <unistd.h>
#include <csignal>

#include "support/models.h"

namespace fsdp::testing {
namespace {

std::string variable(const char* name, const std::string& otherwise = "") {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

std::shared_ptr<World> join_world() {
  WorldOptions options;
  options.timeout = std::chrono::milliseconds(std::stoi(variable("FSDP_TEST_TIMEOUT_MS", "5000")));
  return init_world(options);
}

/// What the faulty rank does in the middle of its third step, after forward.
void fault(World& world, int64_t step) {
  if (step != 2 || std::to_string(world.rank()) != variable("FSDP_TEST_RANK", "1")) return;
  const auto kind = variable("FSDP_TEST_FAULT");
  if (kind == "kill") ::raise(SIGKILL);
  if (kind == "exit") ::_exit(1);
  if (kind == "stop") ::raise(SIGSTOP);
  if (kind == "throw" || kind == "terminate") throw std::runtime_error("the loss is not a number");
  if (kind == "abort") {
    world.abort("the loss is not a number");
    throw std::runtime_error("the loss is not a number");
  }
}

/// Six steps over one axis, or two ("grid").
void train(World& world, const DeviceMesh& mesh, const Placements& placements) {
  auto model = make_mlp(2);
  FsdpContext ctx(mesh.device());
  shard_mlp(*model, ctx, mesh, placements);
  torch::optim::SGD optimizer(fsdp::parameters(*model), torch::optim::SGDOptions(0.1));
  for (int64_t step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    auto loss = mlp_loss(*model, input_of(step, 0, mesh.rank()), target_of(step, 0, mesh.rank()));
    fault(world, step);
    loss.backward();
    optimizer.step();
  }
}

int train_one_axis() {
  auto world = join_world();
  train(*world, init_device_mesh(world, {world->size()}, {"dp"}), zero3("dp"));
  return 0;
}

int train_grid() {
  auto world = join_world();
  train(*world, init_device_mesh(world, {2, world->size() / 2}, {"outer", "inner"}), hsdp("outer", "inner"));
  return 0;
}

/// An exception leaves the step, on every rank, and the program goes on: everything of the step is destroyed in flight.
int unwind_mid_step() {
  auto world = join_world();
  auto mesh = init_device_mesh(world, {world->size()}, {"dp"});
  auto model = make_mlp(2);
  try {
    FsdpContext ctx(mesh.device());
    shard_mlp(*model, ctx, mesh, zero3("dp"));
    auto loss = mlp_loss(*model, input_of(0, 0, mesh.rank()), target_of(0, 0, mesh.rank()));
    throw std::out_of_range("mid-step");
  } catch (const std::out_of_range& e) {
    std::cout << "caught " << e.what() << std::endl;
  }
  return 0;
}

int modules_outlive_their_mesh() {
  auto model = make_mlp(1);
  {
    auto world = join_world();
    auto mesh = init_device_mesh(world, {world->size()}, {"dp"});
    FsdpContext ctx(mesh.device());
    shard_mlp(*model, ctx, mesh, zero3("dp"));
    mlp_loss(*model, input_of(0, 0, mesh.rank()), target_of(0, 0, mesh.rank())).backward();
  }
  model.reset();
  return 0;
}

/// Writes the sum of FSDP_TEST_VALUE over the job's ranks, after FSDP_TEST_GO exists where that is set.
int sum() {
  auto world = join_world();
  auto mesh = init_device_mesh(world, {world->size()}, {"dp"});
  std::cout << "joined as " << world->rank() << " of " << world->size() << std::endl;
  const auto go = variable("FSDP_TEST_GO");
  while (!go.empty() && !std::filesystem::exists(go)) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  auto value = torch::full({1}, std::stoll(variable("FSDP_TEST_VALUE", "1")), torch::kLong);
  mesh.communicator(0).all_reduce(value).wait();
  std::cout << "sum " << value.item<int64_t>() << std::endl;
  world->barrier();
  return 0;
}

/// Two units; rank 1 uses them in the other order.
int other_order() {
  struct Pair : torch::nn::Module {
    Probe first{4, 3}, second{4, 3};
    Pair() {
      register_module("first", first);
      register_module("second", second);
    }
  };
  auto world = join_world();
  auto mesh = init_device_mesh(world, {world->size()}, {"dp"});
  auto model = std::make_shared<Pair>();
  FsdpContext ctx(mesh.device());
  {
    auto scope = fully_shard_context(ctx);
    fully_shard(*model->first, mesh, zero3("dp"));
    fully_shard(*model->second, mesh, zero3("dp"));
    fully_shard(*model, mesh, zero3("dp"));
  }
  const bool swapped = world->rank() == 1;
  auto a = (swapped ? model->second : model->first)->forward(1.0);
  auto b = (swapped ? model->first : model->second)->forward(1.0);
  (a + b).backward();
  return 0;
}

/// A job with one large weight, and the folder its checkpoints go to.
struct SavingJob {
  std::shared_ptr<World> world = join_world();
  DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"dp"});
  std::filesystem::path folder = variable("FSDP_TEST_FOLDER");
  FsdpContext ctx{mesh.device()};
  Probe model{256, 64};

  SavingJob() {
    auto scope = fully_shard_context(ctx);
    fully_shard(model, mesh, zero3("dp"));
  }
};

/// A checkpoint S1, then S2, of which FSDP_TEST_RANK cannot write its part: the system refuses the bytes ("write"), or
/// ends the process there ("kill").
int save_twice() {
  SavingJob job;
  torch::optim::SGD optimizer(fsdp::parameters(*job.model), torch::optim::SGDOptions(0.5));
  save_checkpoint(job.folder / "S1", *job.model, optimizer);
  job.model->forward(1.0).backward();
  optimizer.step();
  if (std::to_string(job.world->rank()) == variable("FSDP_TEST_RANK", "1")) {
    if (variable("FSDP_TEST_FAULT") == "write") std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  save_checkpoint(job.folder / "S2", *job.model, optimizer);
  return 0;
}

/// What a new job finds in that folder.
int load_both() {
  SavingJob job;
  torch::optim::SGD optimizer(fsdp::parameters(*job.model), torch::optim::SGDOptions(0.25));
  try {
    load_checkpoint(job.folder / "S2", *job.model, optimizer);
  } catch (const CheckpointError& e) {
    std::cout << "S2: " << e.what() << std::endl;
  }
  load_checkpoint(job.folder / "S1", *job.model, optimizer);
  torch::NoGradGuard no_grad;
  std::cout << "S1: " << job.model->forward(1.0).item<double>() << std::endl;
  save_checkpoint(job.folder / "S2", *job.model, optimizer);
  load_checkpoint(job.folder / "S2", *job.model, optimizer);
  std::cout << "S2 saved again" << std::endl;
  job.world->barrier();
  return 0;
}

const std::map<std::string, std::function<int()>>& scenarios() {
  static const std::map<std::string, std::function<int()>> all{{"train", train_one_axis},
                                                               {"train_grid", train_grid},
                                                               {"unwind", unwind_mid_step},
                                                               {"outlive", modules_outlive_their_mesh},
                                                               {"sum", sum},
                                                               {"save_twice", save_twice},
                                                               {"load_both", load_both},
                                                               {"other_order", other_order}};
  return all;
}

}  // namespace

int run_scenario(const std::string& name) {
  int code = 0;
  if (variable("FSDP_TEST_FAULT") == "terminate") return scenarios().at(name)();  // out of main
  try {
    code = scenarios().at(name)();
  } catch (const CommError& e) {
    std::cout << "CommError: " << e.what() << std::endl;
    code = 3;
  } catch (const CheckpointError& e) {
    std::cout << "CheckpointError: " << e.what() << std::endl;
    code = 5;
  } catch (const std::exception& e) {
    std::cout << "exception: " << e.what() << std::endl;
    code = 4;
  }
  // What is left is the end of the process; a hang there is killed by this.
  ::alarm(5);
  return code;
}

}  // namespace fsdp::testing
