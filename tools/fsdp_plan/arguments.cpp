#include "fsdp_plan/arguments.h"

#include <charconv>
#include <cmath>
#include <utility>

#include <fsdp/error.h>

#include "plan/strategy.h"
#include "zoo/model_zoo.h"

namespace fsdp::plan {
namespace {

int64_t integer(const std::string& option, const std::string& text) {
  int64_t n = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || stop != text.data() + text.size())
    throw ValueError(option + ": expected an integer, got \"" + text + "\"");
  return n;
}

int64_t gibibytes(const std::string& option, const std::string& text) {
  double n = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || stop != text.data() + text.size() || !(n >= 0) || n > 1e6)
    throw ValueError(option + ": expected a number of GiB, got \"" + text + "\"");
  return static_cast<int64_t>(std::llround(n * 1024 * 1024 * 1024));
}

/// "own" leaves a dtype to the model.
std::optional<Dtype> dtype_or_own(const std::string& option, const std::string& text) {
  if (text == "own") return std::nullopt;
  return parse_dtype(text, option);
}

Options::Layout layout_named(const std::string& text) {
  if (text == "padded") return Options::Layout::kPadded;
  if (text == "unpadded") return Options::Layout::kUnpadded;
  if (text == "tensor-atomic") return Options::Layout::kTensorAtomic;
  throw ValueError("--layout: expected padded, unpadded or tensor-atomic, got \"" + text + "\"");
}

/// Walks through the words; options are spelled --name value or --name=value.
class Words {
 public:
  explicit Words(const std::vector<std::string>& words) : words_(words) {}

  bool next() {
    if (at_ == words_.size()) return false;
    word_ = words_[at_++];
    value_.reset();
    const auto equals = word_.find('=');
    if (word_.starts_with("--") && equals != std::string::npos) {
      value_ = word_.substr(equals + 1);
      word_.resize(equals);
    }
    return true;
  }
  const std::string& word() const { return word_; }
  std::string value() {
    if (value_) return *std::exchange(value_, std::nullopt);
    if (at_ == words_.size()) throw ValueError(word_ + ": expected a value after it");
    return words_[at_++];
  }
  void end_word() const {
    if (value_) throw ValueError(word_ + ": takes no value, got \"" + *value_ + "\"");
  }

 private:
  const std::vector<std::string>& words_;
  size_t at_ = 0;
  std::string word_;
  std::optional<std::string> value_;
};

}  // namespace

Arguments parse_arguments(const std::vector<std::string>& list) {
  Arguments a;
  auto& o = a.options;
  std::string mesh = "1";
  std::optional<int64_t> memory;
  int64_t reserve = 0;
  for (Words words(list); words.next(); words.end_word()) {
    const auto& word = words.word();
    if (word == "--help" || word == "-h")
      a.help = true;
    else if (word == "--mesh" || word == "--ranks")
      mesh = words.value();
    else if (word == "--strategy" || word == "--placements")
      a.strategy = words.value();
    else if (word == "--dtype")
      a.dtype = parse_dtype(words.value(), word);
    else if (word == "--param-dtype")
      o.precision.param = dtype_or_own(word, words.value());
    else if (word == "--main-dtype")
      o.precision.main = dtype_or_own(word, words.value());
    else if (word == "--grad-dtype")
      o.precision.grad = dtype_or_own(word, words.value());
    else if (word == "--comm-dtype")
      o.precision.comm = dtype_or_own(word, words.value());
    else if (word == "--layout")
      o.layout = layout_named(words.value());
    else if (word == "--block")
      o.block = integer(word, words.value());
    else if (word == "--optimizer-state")
      o.optimizer_state = integer(word, words.value());
    else if (word == "--microbatches")
      o.microbatches = integer(word, words.value());
    else if (word == "--reduce-last")
      o.reduce_last = true;
    else if (word == "--keep-after-forward")
      o.reshard_after_forward = false;
    else if (word == "--rank")
      a.rank = integer(word, words.value());
    else if (word == "--gpu-memory")
      memory = gibibytes(word, words.value());
    else if (word == "--reserve")
      reserve = gibibytes(word, words.value());
    else if (word == "--json")
      a.json = true;
    else if (word == "--svg")
      a.svg = words.value();
    else if (word.starts_with("-"))
      throw ValueError("unknown option " + word + "; --help lists them");
    else
      a.model.push_back(word);
  }
  if (a.help) return a;
  if (a.model.empty()) throw ValueError("expected a model; --help says how to name one");
  if (memory) {
    a.gpu_memory = *memory - reserve;
    if (*a.gpu_memory <= 0) throw ValueError("--gpu-memory: expected more than --reserve sets aside");
  } else if (reserve > 0) {
    throw ValueError("--reserve: sets aside a part of --gpu-memory, which is not given");
  }
  o.mesh = parse_mesh(mesh);
  if (a.strategy.empty()) a.strategy = o.mesh.ndim() == 1 ? "zero3" : "hsdp";
  o.placements = parse_strategy(a.strategy, o.mesh);
  return a;
}

std::string usage() {
  std::string models;
  for (const auto& m : zoo::models()) models += "                       " + m.name + "\n";
  return R"(usage: fsdp-plan MODEL [--mesh 8x64] [--strategy hfsdp] [options]

Says what sharded training of a model needs on each rank, and sends, before anything is run.

MODEL is one of
  a name of the zoo:
)" + models +
         R"(  model.json           {"units": [{"name": "block", "count": 12, "tensors": {"wq": [512, 512], "norm": [512]}}]}
                       in order of forward; also "dtype" and "name" of the model, "dtype", "root" (lies around all
                       others: the first) and "frozen" of a unit
  *.safetensors        one file, or all parts of one model; only headers are read. Tensors whose names agree up to
                       the first number ("model.layers.3") form a unit, all others the root

where it runs
  --mesh N | AxB       ranks on one axis, or outer x inner; default 1 (--ranks is the same)
  --strategy S         ddp, zero1, zero2, zero3 (default) on one axis; hsdp (default), hfsdp on two; or three words for
                       weights, gradients and optimizer with a letter per axis: R replicated, P partial, S sharded.
                       RS,PS,SS is hfsdp (--placements is the same)
  --layout L           padded (default), unpadded or tensor-atomic
  --block N            keep blocks of N rows on one rank

number formats: float64, float32, bfloat16 or float16; "own" is the model's
  --dtype D            of the model, where it says none (default float32) or should be read as D
  --param-dtype D      weights in compute and on the wire (default own)
  --main-dtype D       the optimizer's weights (default float32)
  --grad-dtype D       the optimizer's gradients (default own)
  --comm-dtype D       gradients on the wire (default: of the gradient at hand)

a step
  --optimizer-state N  tensors per parameter that the optimizer keeps, in its dtype: 2 (default) for Adam
  --microbatches N     forwards and backwards per step (default 1)
  --reduce-last        reduce gradients after the last microbatch only
  --keep-after-forward keep weights gathered until backward

what to print
  --rank R             figures of rank R (default: the rank that holds most)
  --gpu-memory G       GiB of a GPU: does it fit, and which strategy or mesh would?
  --reserve G          GiB of it for activations, CUDA context and the rest (default 0)
  --json               JSON instead of text; sizes are bytes
  --svg FILE           a picture of who owns which rows

Bytes are exact for weights, gradients, optimizer state and communication. The transient peak follows the runtime:
the weights of a unit and of the next, gathered; gradients of a unit as autograd makes them; gradients of another being
reduced. Activations are not counted.
)";
}

}  // namespace fsdp::plan
