#include <fsdp/activation_checkpoint.h>

#include <algorithm>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "runtime/checkpointed_forward.h"

namespace fsdp::detail {
namespace {

using torch::autograd::variable_list;

/// Random state and autocast settings of this thread on the devices of a segment.
class Surroundings {
 public:
  static Surroundings now(const std::vector<c10::Device>& devices) {
    Surroundings s;
    for (const auto& device : devices) {
      auto generator = at::globalContext().defaultGenerator(device);
      std::lock_guard lock(generator.mutex());
      s.devices_.push_back({device, generator.get_state(), at::autocast::is_autocast_enabled(device.type()),
                            at::autocast::get_autocast_dtype(device.type())});
    }
    s.autocast_cache_ = at::autocast::is_autocast_cache_enabled();
    return s;
  }

  void restore() const {
    for (const auto& d : devices_) {
      auto generator = at::globalContext().defaultGenerator(d.device);
      std::lock_guard lock(generator.mutex());
      generator.set_state(d.random);
      at::autocast::set_autocast_enabled(d.device.type(), d.autocast);
      at::autocast::set_autocast_dtype(d.device.type(), d.autocast_type);
    }
    at::autocast::set_autocast_cache_enabled(autocast_cache_);
  }

  std::vector<c10::Device> devices() const {
    std::vector<c10::Device> all;
    for (const auto& d : devices_) all.push_back(d.device);
    return all;
  }

 private:
  struct PerDevice {
    c10::Device device;
    at::Tensor random;
    bool autocast;
    at::ScalarType autocast_type;
  };
  std::vector<PerDevice> devices_;
  bool autocast_cache_ = true;
};

/// Recreates the surroundings of the first run for its lifetime.
class SurroundingsGuard {
 public:
  explicit SurroundingsGuard(const Surroundings& wanted) : own_(Surroundings::now(wanted.devices())) {
    wanted.restore();
  }
  ~SurroundingsGuard() { own_.restore(); }
  SurroundingsGuard(const SurroundingsGuard&) = delete;
  SurroundingsGuard& operator=(const SurroundingsGuard&) = delete;

 private:
  Surroundings own_;
};

/// Its inputs are a segment's inputs and one empty tensor that needs a gradient: autograd must come by here also when
/// only weights inside the segment do.
struct CheckpointNode final : torch::autograd::Node {
  Segment segment;
  std::vector<torch::autograd::SavedVariable> saved;
  std::vector<bool> needs_grad;
  Surroundings surroundings;

  std::string name() const override { return "fsdp::checkpoint"; }

  void release_variables() override {
    for (auto& s : saved) s.reset_data();
    segment = nullptr;
  }

  variable_list apply(variable_list&& gradients) override {
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid())
      throw StateError(
          "fsdp::checkpoint: backward by autograd::grad() or with inputs named cannot run a segment again; call "
          "backward() on the loss");
    if (!segment) throw StateError("fsdp::checkpoint: second backward over a segment; keep the graph in the first one");
    variable_list inputs;
    for (size_t i = 0; i < saved.size(); ++i) {
      auto input = saved[i].unpack().detach();
      input.set_requires_grad(needs_grad[i]);
      inputs.push_back(std::move(input));
    }
    variable_list roots, given;
    {
      SurroundingsGuard same(surroundings);
      c10::AutoGradMode grad(true);
      auto outputs = segment(inputs);
      if (outputs.size() != gradients.size())
        throw StateError("fsdp::checkpoint: the second run returned another number of tensors than the first");
      for (size_t i = 0; i < outputs.size(); ++i)
        if (gradients[i].defined() && outputs[i].requires_grad()) {
          roots.push_back(outputs[i]);
          given.push_back(gradients[i]);
        }
    }
    if (!roots.empty()) torch::autograd::backward(roots, given);
    variable_list result;
    for (const auto& input : inputs) result.push_back(input.grad());
    result.emplace_back();
    return result;
  }
};

std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices{c10::Device(c10::kCPU)};
  for (const auto& t : tensors)
    if (std::find(devices.begin(), devices.end(), t.device()) == devices.end()) devices.push_back(t.device());
  return devices;
}

/// Nodes are shared pointers in LibTorch 2.11 and count their own references in 2.15.
template <class T>
auto make_node() {
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>)
    return std::shared_ptr<T>(new T, [](T* node) { deleteNode(node); });
  else
    return c10::make_intrusive<T>();
}

bool differentiable(const at::Tensor& t) { return t.is_floating_point() || t.is_complex(); }

}  // namespace

std::vector<at::Tensor> run_checkpointed(Segment segment, std::vector<at::Tensor> inputs) {
  auto surroundings = Surroundings::now(devices_of(inputs));
  std::vector<at::Tensor> outputs;
  {
    c10::NoGradGuard no_grad;
    CheckpointedForward training;
    outputs = segment(inputs);
  }
  auto node = make_node<CheckpointNode>();
  node->segment = std::move(segment);
  node->surroundings = std::move(surroundings);
  auto edges = inputs;
  edges.push_back(at::empty({0}, at::kFloat).set_requires_grad(true));
  node->set_next_edges(torch::autograd::collect_next_edges(edges));
  for (const auto& input : inputs) {
    node->saved.emplace_back(input, /*is_output=*/false);
    node->needs_grad.push_back(input.requires_grad());
  }
  for (auto& output : outputs) {
    // An output may be an input, or a view made without grad mode: neither takes this node as its history.
    output = output.detach();
    if (differentiable(output))
      torch::autograd::set_history(output, node);
    else
      node->add_input_metadata(torch::autograd::Node::undefined_input());
  }
  return outputs;
}

}  // namespace fsdp::detail
