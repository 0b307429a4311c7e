#include <algorithm>
#include <initializer_list>

#include <fsdp/error.h>

#include "json/json.h"
#include "plan/model_readers.h"

namespace fsdp::plan {
namespace {

/// A value and the way to it, for messages.
class Node {
 public:
  Node(const json::Value& value, std::string path) : value_(value), path_(std::move(path)) {}

  [[noreturn]] void fail(const std::string& why) const { throw ValueError(path_ + ": " + why); }

  const json::Value::Object& object(std::initializer_list<std::string_view> allowed) const {
    const auto* o = std::get_if<json::Value::Object>(&value_.data());
    if (!o) fail("expected an object");
    for (const auto& [key, value] : *o)
      if (std::find(allowed.begin(), allowed.end(), key) == allowed.end()) {
        std::string text;
        for (auto a : allowed) text += (text.empty() ? "\"" : ", \"") + std::string(a) + "\"";
        fail("unknown member \"" + key + "\"; expected " + text);
      }
    return *o;
  }

  std::optional<Node> find(std::string_view key) const {
    const auto* v = value_.find(key);
    if (!v) return std::nullopt;
    return Node(*v, path_ + "." + std::string(key));
  }

  Node at(std::string_view key) const {
    auto node = find(key);
    if (!node) fail("expected a member \"" + std::string(key) + "\"");
    return *node;
  }

  template <class T>
  const T& as(const char* what) const {
    if (const auto* v = std::get_if<T>(&value_.data())) return *v;
    fail(std::string("expected ") + what);
  }

  const std::string& path() const { return path_; }

 private:
  const json::Value& value_;
  std::string path_;
};

template <class T>
T optional_member(const Node& node, std::string_view key, const char* what, T otherwise) {
  const auto member = node.find(key);
  return member ? member->as<T>(what) : otherwise;
}

std::optional<Dtype> dtype_member(const Node& node) {
  const auto member = node.find("dtype");
  if (!member) return std::nullopt;
  return parse_dtype(member->as<std::string>("the name of a dtype"), member->path());
}

Shape read_shape(const Node& node) {
  Shape shape;
  const auto& items = node.as<json::Value::Array>("a shape: a list of integers");
  for (size_t i = 0; i < items.size(); ++i) {
    const Node item(items[i], node.path() + "[" + std::to_string(i) + "]");
    const auto n = item.as<int64_t>("an integer");
    if (n < 0) item.fail("expected a dimension of at least 0, got " + std::to_string(n));
    shape.push_back(n);
  }
  return shape;
}

Unit read_unit(const Node& node, Dtype dtype, std::optional<Dtype> override_dtype) {
  node.object({"name", "count", "root", "frozen", "dtype", "tensors"});
  Unit unit{.name = node.at("name").as<std::string>("a string"),
            .count = optional_member<int64_t>(node, "count", "an integer", 1),
            .root = optional_member<bool>(node, "root", "true or false", false),
            .frozen = optional_member<bool>(node, "frozen", "true or false", false)};
  const auto own = override_dtype.value_or(dtype_member(node).value_or(dtype));
  const auto tensors = node.at("tensors");
  for (const auto& [name, shape] : tensors.as<json::Value::Object>("an object of names and shapes"))
    unit.tensors.push_back({name, read_shape(Node(shape, tensors.path() + "[\"" + name + "\"]")), own});
  return unit;
}

}  // namespace

Model json_model(std::string_view text, const std::string& where, std::optional<Dtype> dtype) {
  json::Value document;
  try {
    document = json::parse(text);
  } catch (const json::Error& e) {
    throw ValueError(where + ": " + e.what());
  }
  const Node root(document, where + ": the document");
  root.object({"name", "dtype", "units"});
  Model model{optional_member<std::string>(root, "name", "a string", where), {}, {}};
  const auto own = dtype_member(root).value_or(Dtype::kFloat32);
  const auto units = Node(root.at("units"));
  const auto& items = units.as<json::Value::Array>("a list of units");
  for (size_t i = 0; i < items.size(); ++i)
    model.units.push_back(read_unit(Node(items[i], where + ": units[" + std::to_string(i) + "]"), own, dtype));
  try {
    check(model);
  } catch (const ValueError& e) {
    throw ValueError(where + ": " + e.what());
  }
  return model;
}

}  // namespace fsdp::plan
