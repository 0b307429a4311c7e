/// fsdp-plan: memory and communication of sharded training, without running it. --help says how.
#include <exception>
#include <fstream>
#include <iostream>

#include <fsdp/error.h>

#include "fsdp_plan/arguments.h"
#include "plan/fit.h"
#include "plan/model_readers.h"
#include "plan/picture.h"
#include "plan/report.h"

namespace {

void run(const fsdp::plan::Arguments& a) {
  using namespace fsdp::plan;
  const auto model = read_model(a.model, a.dtype);
  Report report{.plan = make_plan(model, a.options), .strategy = a.strategy, .notes = model.notes};
  report.largest = !a.rank;
  report.figures = figures(report.plan, a.rank ? *a.rank : largest_rank(report.plan));
  if (a.gpu_memory) report.fit = fit(model, a.options, a.strategy, *a.gpu_memory);
  if (!a.svg.empty()) {
    std::ofstream out(a.svg);
    out << as_svg(report.plan);
    if (!out.flush()) throw fsdp::ValueError("--svg: cannot write " + a.svg);
  }
  std::cout << (a.json ? as_json(report) : as_text(report));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto arguments = fsdp::plan::parse_arguments({argv + 1, argv + argc});
    if (arguments.help)
      std::cout << fsdp::plan::usage();
    else
      run(arguments);
    return std::cout.flush() ? 0 : 1;
  } catch (const std::exception& e) {
    std::cerr << "fsdp-plan: " << e.what() << "\n";
    return 2;
  }
}
