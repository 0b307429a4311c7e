#pragma once

namespace fsdp::detail {

/// On this thread fsdp::checkpoint runs a segment for the first time: grad mode is off, yet its units are in training
/// and run again in backward.
class CheckpointedForward {
 public:
  CheckpointedForward() { ++depth(); }
  ~CheckpointedForward() { --depth(); }
  CheckpointedForward(const CheckpointedForward&) = delete;
  CheckpointedForward& operator=(const CheckpointedForward&) = delete;

  static bool active() { return depth() > 0; }

 private:
  static int& depth() {
    thread_local int depth = 0;
    return depth;
  }
};

}  // namespace fsdp::detail
