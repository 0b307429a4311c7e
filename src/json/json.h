#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

/// A small JSON reader, for checkpoints and tools: whole documents in memory, numbers as 64-bit integers where they are
/// written as such. Strings are UTF-8.
namespace fsdp::json {

/// A document that is not JSON, or not what was asked for. Names the line and column where reading stopped, or the key.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Value {
 public:
  using Array = std::vector<Value>;
  using Object = std::vector<std::pair<std::string, Value>>;  // in document order
  using Data = std::variant<std::nullptr_t, bool, int64_t, double, std::string, Array, Object>;

  Value(Data data = nullptr) : data_(std::move(data)) {}

  int64_t as_int() const { return get<int64_t>("an integer"); }
  bool as_bool() const { return get<bool>("a boolean"); }
  const std::string& as_string() const { return get<std::string>("a string"); }
  const Array& as_array() const { return get<Array>("an array"); }
  const Object& as_object() const { return get<Object>("an object"); }
  const Data& data() const { return data_; }

  /// Member of an object; nullptr if there is none.
  const Value* find(std::string_view key) const;
  /// Member of an object; Error naming the key if there is none.
  const Value& at(std::string_view key) const;
  std::vector<int64_t> as_ints() const;

 private:
  template <class T>
  const T& get(const char* what) const {
    if (const T* v = std::get_if<T>(&data_)) return *v;
    throw Error(std::string("JSON: expected ") + what);
  }

  Data data_;
};

/// Reads one document; Error for anything else, also for text behind it or more than 100 levels of nesting.
Value parse(std::string_view text);

}  // namespace fsdp::json
