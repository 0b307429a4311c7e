#include "json/json.h"

#include <algorithm>
#include <charconv>

namespace fsdp::json {

namespace {

constexpr int kMaxDepth = 100;

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Value document() {
    Value v = value(0);
    skip_space();
    if (at_ != text_.size()) fail("expected the end");
    return v;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    const auto before = text_.substr(0, at_);
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const auto column = at_ - (before.rfind('\n') + 1) + 1;  // npos + 1 is 0: the first line
    throw Error("JSON, line " + std::to_string(line) + ", column " + std::to_string(column) + ": " + why);
  }

  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }

  char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!take(c)) fail(std::string("expected '") + c + "'");
  }

  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Value value(int depth) {
    if (depth > kMaxDepth) fail("nested too deeply");
    switch (peek()) {
      case '{':
        return object(depth);
      case '[':
        return array(depth);
      case '"':
        return Value(string());
      default:
        break;
    }
    if (take_word("true")) return Value(true);
    if (take_word("false")) return Value(false);
    if (take_word("null")) return Value();
    return number();
  }

  Value object(int depth) {
    Value::Object members;
    expect('{');
    if (take('}')) return Value(std::move(members));
    do {
      if (peek() != '"') fail("expected a key");
      auto key = string();
      expect(':');
      members.emplace_back(std::move(key), value(depth + 1));
    } while (take(','));
    expect('}');
    return Value(std::move(members));
  }

  Value array(int depth) {
    Value::Array items;
    expect('[');
    if (take(']')) return Value(std::move(items));
    do items.push_back(value(depth + 1));
    while (take(','));
    expect(']');
    return Value(std::move(items));
  }

  std::string string() {
    expect('"');
    std::string s;
    while (at_ < text_.size() && text_[at_] != '"') {
      const char c = text_[at_++];
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
      if (c == '\\')
        s += escaped();
      else
        s += c;
    }
    if (at_ == text_.size()) fail("the string does not end");
    ++at_;
    return s;
  }

  std::string escaped() {
    if (at_ == text_.size()) fail("the string does not end");
    const char c = text_[at_++];
    switch (c) {
      case '"':
      case '\\':
      case '/':
        return {c};
      case 'b':
        return "\b";
      case 'f':
        return "\f";
      case 'n':
        return "\n";
      case 'r':
        return "\r";
      case 't':
        return "\t";
      case 'u':
        return unicode();
      default:
        fail("an unknown escape");
    }
  }

  uint32_t code_unit() {
    uint32_t code = 0;
    const char* begin = text_.data() + at_;
    const char* end = begin + std::min<size_t>(4, text_.size() - at_);
    if (std::from_chars(begin, end, code, 16).ptr != begin + 4) fail("expected four hexadecimal digits");
    at_ += 4;
    return code;
  }

  std::string unicode() {
    uint32_t code = code_unit();
    if (code >= 0xd800 && code < 0xe000) {
      if (code >= 0xdc00 || text_.substr(at_, 2) != "\\u") fail("half a surrogate pair");
      at_ += 2;
      const uint32_t low = code_unit();
      if (low < 0xdc00 || low >= 0xe000) fail("half a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    auto tail = [&](int shift) { return static_cast<char>(0x80 | ((code >> shift) & 0x3f)); };
    if (code < 0x80) return {static_cast<char>(code)};
    if (code < 0x800) return {static_cast<char>(0xc0 | (code >> 6)), tail(0)};
    if (code < 0x10000) return {static_cast<char>(0xe0 | (code >> 12)), tail(6), tail(0)};
    return {static_cast<char>(0xf0 | (code >> 18)), tail(12), tail(6), tail(0)};
  }

  Value number() {
    const char* begin = text_.data() + at_;
    const char* end = text_.data() + text_.size();
    if (begin == end || (*begin != '-' && (*begin < '0' || *begin > '9'))) fail("expected a value");
    int64_t integer = 0;
    const auto as_int = std::from_chars(begin, end, integer);
    double real = 0;
    const auto as_real = std::from_chars(begin, end, real);
    if (as_real.ec != std::errc()) fail("not a number that can be held");
    at_ += static_cast<size_t>(as_real.ptr - begin);
    if (as_int.ec == std::errc() && as_int.ptr == as_real.ptr) return Value(integer);
    return Value(real);
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

const Value* Value::find(std::string_view key) const {
  for (const auto& [name, value] : as_object())
    if (name == key) return &value;
  return nullptr;
}

const Value& Value::at(std::string_view key) const {
  if (const Value* v = find(key)) return *v;
  throw Error("JSON: expected a member \"" + std::string(key) + "\"");
}

std::vector<int64_t> Value::as_ints() const {
  std::vector<int64_t> ints;
  for (const auto& v : as_array()) ints.push_back(v.as_int());
  return ints;
}

Value parse(std::string_view text) { return Reader(text).document(); }

}  // namespace fsdp::json
