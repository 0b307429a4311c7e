#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

/// Ranks as real processes: each is this test binary again, running one scenario (scenarios.h) instead of the tests.
namespace fsdp::testing {

using Variables = std::map<std::string, std::string>;

/// How a child ended and what it wrote.
struct Outcome {
  int exit_code = -1;  // -1: by a signal
  int signal = 0;
  bool hung = false;  // was still running at the limit, and was killed
  std::string output;
};

class Child {
 public:
  /// Runs `command`, or this binary when it is empty, with the parent's environment less every launcher's variables,
  /// and FSDP_TEST_SCENARIO and `variables` in it.
  Child(const std::string& scenario, const Variables& variables, std::vector<std::string> command = {});
  /// Kills it if it still runs.
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  Outcome wait(std::chrono::milliseconds limit = std::chrono::seconds(60));
  /// Until the child has written `text`; false when it has not within a minute.
  bool wait_for_output(const std::string& text) const;
  void kill();

 private:
  pid_t pid_ = -1;
  std::string file_;
};

/// A port of the loopback that nobody uses now.
int free_port();
/// A path that nothing has; removed by whoever makes it.
std::string fresh_path();

/// What torchrun sets for `rank`.
Variables torchrun_variables(int rank, int size, int port);

/// Runs a scenario on `size` ranks, started together, and waits for all.
std::vector<Outcome> run_ranks(const std::string& scenario, int size, const Variables& variables = {});

}  // namespace fsdp::testing
