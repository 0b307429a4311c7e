#include "options.h"

#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <stdexcept>

namespace {

constexpr const char* kUsage = R"(train_gpt: trains a byte-level GPT on text, sharded over the ranks it is launched with
  --data PATH          text file or folder (default: LibTorch's own C++ headers)
  --strategy S         none, ddp, zero1, zero2, zero3 (default zero3)
  --dtype T            compute in float32 or bfloat16 (default float32); weights and optimizer stay float32
  --dim N --heads N --layers N --length N    the model
  --batch N --microbatches N --steps N       sequences per rank and microbatch, microbatches per step, steps
  --lr X --warmup N --clip X --seed N        peak learning rate (cosine schedule), steps of warm-up, gradient norm
  --sample N           bytes of text to generate at the end (default 240)
  --save DIR --save-every N   a checkpoint DIR/step-K every N steps (default: at the end only)
  --resume CHECKPOINT  go on from DIR/step-K, on any number of ranks and with any strategy; --steps counts from the start
  --out DIR            loss.jsonl and loss.svg (default runs)
  --formula            the run of benchmarks/peers/gpt_fsdp2.py instead; prints its JSON line. Takes --vocab --length --dim
                       --heads --layers --batch --micro --steps --warmup --dtype --clip, with that script's defaults
)";

int64_t integer(const std::string& name, const std::string& text) {
  size_t used = 0;
  int64_t value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used != text.size() || text.empty() || value < 0)
    throw std::invalid_argument("--" + name + ": expected a number of at least 0, got '" + text + "'");
  return value;
}

double real(const std::string& name, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end) throw std::invalid_argument("--" + name + ": expected a number, got '" + text + "'");
  return value;
}

void require(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument(what);
}

}  // namespace

Options parse_options(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--help") {
      std::cout << kUsage;
      std::exit(0);
    }
    if (argument == "--formula") o.formula = true;
  }
  if (o.formula) {
    o.length = 64, o.batch = 2, o.steps = 20, o.warmup = 3, o.clip = 0.0;
  } else {
    o.warmup = 20;
  }
  const std::map<std::string, std::function<void(const std::string&, const std::string&)>> setters = {
      {"strategy", [&](auto&, auto& v) { o.strategy = v; }},
      {"dtype", [&](auto&, auto& v) { o.dtype = v; }},
      {"data", [&](auto&, auto& v) { o.data = v; }},
      {"out", [&](auto&, auto& v) { o.out = v; }},
      {"save", [&](auto&, auto& v) { o.save = v; }},
      {"save-every", [&](auto& n, auto& v) { o.save_every = integer(n, v); }},
      {"resume", [&](auto&, auto& v) { o.resume = v; }},
      {"vocab", [&](auto& n, auto& v) { o.vocab = integer(n, v); }},
      {"length", [&](auto& n, auto& v) { o.length = integer(n, v); }},
      {"dim", [&](auto& n, auto& v) { o.dim = integer(n, v); }},
      {"heads", [&](auto& n, auto& v) { o.heads = integer(n, v); }},
      {"layers", [&](auto& n, auto& v) { o.layers = integer(n, v); }},
      {"batch", [&](auto& n, auto& v) { o.batch = integer(n, v); }},
      {"micro", [&](auto& n, auto& v) { o.micro = integer(n, v); }},
      {"microbatches", [&](auto& n, auto& v) { o.micro = integer(n, v); }},
      {"steps", [&](auto& n, auto& v) { o.steps = integer(n, v); }},
      {"warmup", [&](auto& n, auto& v) { o.warmup = integer(n, v); }},
      {"clip", [&](auto& n, auto& v) { o.clip = real(n, v); }},
      {"lr", [&](auto& n, auto& v) { o.lr = real(n, v); }},
      {"seed", [&](auto& n, auto& v) { o.seed = static_cast<uint64_t>(integer(n, v)); }},
      {"sample", [&](auto& n, auto& v) { o.sample = integer(n, v); }},
  };
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--formula") continue;
    const auto it = argument.starts_with("--") ? setters.find(argument.substr(2)) : setters.end();
    if (it == setters.end()) throw std::invalid_argument("unknown option '" + argument + "'; --help lists them");
    if (i + 1 == argc) throw std::invalid_argument(argument + " needs a value");
    it->second(it->first, argv[++i]);
  }
  require(o.strategy == "none" || o.strategy == "ddp" || o.strategy == "zero1" || o.strategy == "zero2" ||
              o.strategy == "zero3",
          "--strategy: expected none, ddp, zero1, zero2 or zero3, got '" + o.strategy + "'");
  require(o.dtype == "float32" || o.dtype == "bfloat16",
          "--dtype: expected float32 or bfloat16, got '" + o.dtype + "'");
  require(o.strategy != "none" || o.dtype == "float32", "--strategy none computes in float32 only");
  require(o.dim > 0 && o.heads > 0 && o.dim % o.heads == 0, "--dim must be a multiple of --heads");
  require(o.layers > 0 && o.batch > 0 && o.micro > 0 && o.steps > 0 && o.length > 1 && o.vocab > 1,
          "--layers, --batch, --microbatches and --steps must be at least 1, --length and --vocab at least 2");
  require(o.save_every == 0 || !o.save.empty(), "--save-every needs --save");
  return o;
}
