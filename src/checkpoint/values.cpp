#include "checkpoint/values.h"

#include <cmath>
#include <limits>

#include <ATen/core/List.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "json/text.h"

namespace fsdp::detail {
namespace {

/// Always told apart from an integer, and exact.
std::string real(double value) {
  if (std::isnan(value)) return R"({"real":"nan"})";
  if (std::isinf(value)) return value > 0 ? R"({"real":"inf"})" : R"({"real":"-inf"})";
  auto text = fmt::format("{}", value);
  return text.find_first_of(".e") == std::string::npos ? fmt::format("{}.0", text) : text;
}

}  // namespace

std::string to_json(const c10::IValue& value) {
  if (value.isNone()) return "null";
  if (value.isBool()) return value.toBool() ? "true" : "false";
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isDouble()) return real(value.toDouble());
  if (value.isString()) return json::quoted(value.toStringRef());
  if (value.isIntList()) return fmt::format(R"({{"integers":[{}]}})", fmt::join(value.toIntVector(), ","));
  std::vector<std::string> items;
  if (value.isDoubleList()) {
    for (const auto item : value.toDoubleVector()) items.push_back(real(item));
    return fmt::format(R"({{"reals":[{}]}})", fmt::join(items, ","));
  }
  if (value.isTuple()) {
    for (const auto& item : value.toTupleRef().elements()) items.push_back(to_json(item));
    return fmt::format(R"({{"tuple":[{}]}})", fmt::join(items, ","));
  }
  throw CheckpointError(fmt::format("a value of type {} cannot be stored", value.type()->repr_str()));
}

c10::IValue from_json_value(const json::Value& value) {
  const auto& data = value.data();
  if (std::holds_alternative<std::nullptr_t>(data)) return {};
  if (const auto* v = std::get_if<bool>(&data)) return *v;
  if (const auto* v = std::get_if<int64_t>(&data)) return *v;
  if (const auto* v = std::get_if<double>(&data)) return *v;
  if (const auto* v = std::get_if<std::string>(&data)) return *v;
  if (const auto* object = std::get_if<json::Value::Object>(&data); object && object->size() == 1) {
    const auto& [kind, content] = object->front();
    if (kind == "real") {
      const auto& name = content.as_string();
      if (name == "nan") return std::numeric_limits<double>::quiet_NaN();
      if (name == "inf") return std::numeric_limits<double>::infinity();
      if (name == "-inf") return -std::numeric_limits<double>::infinity();
      throw json::Error("no real number: " + json::quoted(name));
    }
    if (kind == "integers") {
      c10::List<int64_t> list;
      for (auto item : content.as_ints()) list.push_back(item);
      return list;
    }
    std::vector<c10::IValue> items;
    for (const auto& item : content.as_array()) items.push_back(from_json_value(item));
    if (kind == "tuple") return c10::ivalue::Tuple::create(std::move(items));
    if (kind == "reals") {
      c10::List<double> list;
      for (const auto& item : items) {
        if (!item.isDouble()) throw json::Error("JSON: expected real numbers");
        list.push_back(item.toDouble());
      }
      return list;
    }
  }
  throw json::Error("a value that this version does not know");
}

}  // namespace fsdp::detail
