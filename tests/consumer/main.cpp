#include <cstdio>

#include <fsdp/fsdp.h>
#include <torch/optim/sgd.h>

int64_t planned_size();  // other.cpp: the headers in two translation units

struct NetImpl : torch::nn::Module {
  torch::Tensor weight = register_parameter("weight", torch::ones({3, 2}));
  torch::Tensor forward(torch::Tensor x) { return x.matmul(weight.t()); }
};
FSDP_MODULE(Net);

int main() {
  auto world = fsdp::init_world();
  auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"dp"});
  fsdp::FsdpContext context(world->device());
  Net net;
  {
    auto scope = fsdp::fully_shard_context(context);
    fsdp::fully_shard(net, mesh, fsdp::zero3("dp"));
  }
  torch::optim::SGD optimizer(fsdp::parameters(*net), 0.5);
  net->forward(torch::ones({1, 2})).sum().backward();
  optimizer.step();
  // Each weight was 1, its gradient is 1, the rate is 0.5.
  const double sum = net->weight.sum().item<double>();
  std::printf("sum of weights %g, planned %ld elements\n", sum, static_cast<long>(planned_size()));
  return sum == 3.0 && planned_size() == 6 ? 0 : 1;
}
