#pragma once

#include <cstdint>
#include <string>

/// Command line of train_gpt. The names of the formula run are those of benchmarks/peers/gpt_fsdp2.py.
struct Options {
  std::string strategy = "zero3";  // none, ddp, zero1, zero2, zero3
  std::string dtype = "float32";   // compute: float32 or bfloat16
  bool formula = false;

  int64_t vocab = 256, length = 128, dim = 256, heads = 4, layers = 4, batch = 8;
  int64_t micro = 1, steps = 300, warmup = 0;
  double clip = 1.0, lr = 1e-3;
  uint64_t seed = 1;
  int64_t sample = 240;      // bytes of text to generate at the end
  std::string data;          // file or folder
  std::string out = "runs";  // where loss.jsonl and loss.svg go
  std::string save;          // folder for checkpoints; none without it
  int64_t save_every = 0;    // steps; 0: at the end only
  std::string resume;        // a checkpoint to go on from
};

/// Prints usage and exits on --help; throws std::invalid_argument naming what it does not understand.
Options parse_options(int argc, char** argv);
