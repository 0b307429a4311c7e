#include "safetensors/header.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "json/json.h"
#include "json/text.h"
#include "support/folder.h"

namespace fsdp::safetensors {
namespace {

using ::testing::HasSubstr;

std::filesystem::path written(const testing::TemporaryFolder& folder, const std::string& bytes) {
  const auto path = folder / "f.safetensors";
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

TEST(Safetensors, WhatIsWrittenIsRead) {
  testing::TemporaryFolder folder;
  std::vector<Entry> entries{{"flags \"a\"", "BOOL", {3}},
                             {"half", "BF16", {3, 1}},
                             {"scalar", "F64", {}},
                             {"none", "F32", {0, 7}},
                             {"weight", "F32", {2, 3}}};
  const auto text = layout(entries, {{"format", "pt"}, {"line", "a\nb\\"}});
  EXPECT_EQ(text.size() % 8, 0u);
  // Without holes, each at a multiple of its element's size.
  const auto end = static_cast<int64_t>(text.size());
  EXPECT_EQ(entries[2].offset, end);
  EXPECT_EQ(entries[3].offset, end + 8);
  EXPECT_EQ(entries[4].offset, end + 8);
  EXPECT_EQ(entries[1].offset, end + 8 + 24);
  EXPECT_EQ(entries[0].offset, end + 8 + 24 + 6);
  const auto path = written(folder, text + std::string(8 + 24 + 6 + 3, 'x'));
  const auto header = read_header(path);
  EXPECT_NO_THROW(check_tensors(header, path));
  EXPECT_EQ(header.metadata, (Metadata{{"format", "pt"}, {"line", "a\nb\\"}}));
  ASSERT_EQ(header.entries.size(), entries.size());
  for (const auto& e : header.entries) {
    const auto it = std::find_if(entries.begin(), entries.end(), [&](const auto& o) { return o.name == e.name; });
    ASSERT_NE(it, entries.end()) << e.name;
    EXPECT_EQ(e.dtype, it->dtype);
    EXPECT_EQ(e.shape, it->shape);
    EXPECT_EQ(e.offset, it->offset);
    EXPECT_EQ(e.bytes, it->bytes);
  }
  EXPECT_TRUE(read_header(written(folder, layout({}, {}))).entries.empty());
}

TEST(Safetensors, TensorsThatTheFileDoesNotHold) {
  testing::TemporaryFolder folder;
  auto error = [&](const std::string& range, const std::string& shape, size_t data) -> std::string {
    auto json = R"({"a":{"dtype":"F32","shape":[)" + shape + R"(],"data_offsets":[)" + range + "]}}";
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(json.size());
    const auto path = written(folder, bytes + json + std::string(data, 'x'));
    try {
      check_tensors(read_header(path), path);
    } catch (const FormatError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(error("0,8", "2", 8), "");
  EXPECT_THAT(error("0,8", "2", 7), HasSubstr("tensor \"a\" should end at byte"));
  EXPECT_THAT(error("0,8", "3", 8), HasSubstr("has 8 bytes, which is not F32 of shape [3]"));
  EXPECT_THAT(error("0,8", "-2", 8), HasSubstr("which is not F32"));
  EXPECT_THAT(error("0,8", "9223372036854775807,2", 8), HasSubstr("which is not F32"));
  EXPECT_THAT(error("8,0", "2", 8), HasSubstr("data_offsets"));
  EXPECT_THAT(error("-8,0", "2", 8), HasSubstr("data_offsets"));
  EXPECT_THAT(error("0", "2", 8), HasSubstr("data_offsets"));
  EXPECT_THAT(error("0,9223372036854775807", "2", 8), HasSubstr("tensor \"a\""));
}

TEST(JsonText, StringsComeBack) {
  const std::string text = "a \"quoted\" \\ line\n\t\x01 and \xc3\xa9";
  EXPECT_EQ(json::parse(json::quoted(text)).as_string(), text);
}

}  // namespace
}  // namespace fsdp::safetensors
