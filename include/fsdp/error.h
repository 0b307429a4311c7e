#pragma once

#include <stdexcept>

/// Error types of the library. Every message says what was expected, what was received, where
/// (parameter FQN, mesh axis, rank) and what to do. None of these headers needs LibTorch.
namespace fsdp {

/// A wrong argument: a caller mistake. Thrown before anything was changed.
class ValueError : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// A call in the wrong state (outside a context, in the wrong phase, on a parameter that was
/// replaced behind the library's back).
class StateError : public std::logic_error {
  using std::logic_error::logic_error;
};

/// Communication failed, timed out or was mismatched between ranks. The communicator that threw is
/// not usable afterwards.
class CommError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A checkpoint is missing, incomplete, damaged, or does not fit the model.
class CheckpointError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace fsdp
