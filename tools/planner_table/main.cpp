/// Writes the tables of docs/planner.md anew: planner_table docs/planner.md
#include <fstream>
#include <iostream>
#include <sstream>

#include "zoo/model_zoo.h"
#include "zoo/padding_table.h"

namespace {

/// Replaces what stands between the lines "<!-- NAME -->" and "<!-- end of NAME -->".
void replace_section(std::string& text, const std::string& name, const std::string& with) {
  const std::string begin_mark = "<!-- " + name + " -->\n", end_mark = "<!-- end of " + name + " -->";
  const auto begin = text.find(begin_mark), end = text.find(end_mark);
  if (begin == std::string::npos || end == std::string::npos || end < begin)
    throw std::runtime_error("no section between " + begin_mark + " and " + end_mark);
  text.replace(begin + begin_mark.size(), end - begin - begin_mark.size(), with);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: planner_table docs/planner.md\n";
    return 2;
  }
  try {
    std::ostringstream text;
    text << std::ifstream(argv[1]).rdbuf();
    std::string document = text.str(), sources = "| model | source of the shapes |\n|---|---|\n";
    for (const auto& m : fsdp::zoo::models()) sources += "| " + m.name + " | " + m.source + " |\n";
    replace_section(document, "padding table", fsdp::zoo::padding_table());
    replace_section(document, "model sources", sources);
    std::ofstream out(argv[1]);
    out << document;
    if (!out.flush()) throw std::runtime_error(std::string("cannot write ") + argv[1]);
  } catch (const std::exception& e) {
    std::cerr << "planner_table: " << e.what() << "\n";
    return 1;
  }
}
