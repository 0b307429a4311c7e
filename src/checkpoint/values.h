#pragma once

#include <string>

#include <ATen/core/ivalue.h>

#include "json/json.h"

/// Numbers, booleans, strings, none, and tuples and lists of them, as JSON that keeps their types: what the options and
/// the state of optimizers hold besides tensors.
namespace fsdp::detail {

/// CheckpointError for a value of another type.
std::string to_json(const c10::IValue& value);
/// json::Error for anything else than what to_json() writes.
c10::IValue from_json_value(const json::Value& value);

}  // namespace fsdp::detail
