#pragma once

#include <cstdlib>

#include <gtest/gtest.h>

namespace fsdp::testing {

/// A variable of the environment for the life of this object; only while no ranks run.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

/// Tests that every transport of the CPU must pass.
class OnTransport : public ::testing::TestWithParam<const char*> {
 private:
  const Variable backend_{"FSDP_BACKEND", GetParam()};
};

/// Instantiates a suite derived from OnTransport.
#define FSDP_ON_TRANSPORTS(Suite)                                               \
  INSTANTIATE_TEST_SUITE_P(Transports, Suite, ::testing::Values("gloo", "shm"), \
                           [](const auto& info) { return std::string(info.param); })

}  // namespace fsdp::testing
