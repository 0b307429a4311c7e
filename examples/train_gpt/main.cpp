#include <cstdlib>
#include <iostream>

#include <ATen/Parallel.h>

#include "run.h"

int main(int argc, char** argv) {
  try {
    const auto options = parse_options(argc, argv);
    const char* threads = std::getenv("OMP_NUM_THREADS");
    at::set_num_threads(threads ? std::atoi(threads) : 1);  // ranks share this machine's cores
    auto world = fsdp::init_world();
    if (options.formula)
      run_formula(options, world);
    else
      run_training(options, world);
    world->barrier();
    return 0;
  } catch (const std::exception& e) {
    std::cerr << "train_gpt: " << e.what() << std::endl;
    return 1;
  }
}
