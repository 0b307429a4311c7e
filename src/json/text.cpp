#include "json/text.h"

namespace fsdp::json {

std::string quoted(std::string_view text) {
  static constexpr const char* kHex = "0123456789abcdef";
  std::string s = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') s += '\\';
    if (c < 0x20) {
      s += "\\u00";
      s += kHex[c >> 4];
      s += kHex[c & 15];
    } else {
      s += static_cast<char>(c);
    }
  }
  return s + "\"";
}

}  // namespace fsdp::json
