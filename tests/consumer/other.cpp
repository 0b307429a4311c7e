#include <fsdp/fsdp.h>

int64_t planned_size() {
  const std::vector<fsdp::Shape> shapes{{3, 2}};
  return fsdp::build_row_atomic_layout(shapes, 3).size;
}
