#include "json/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::json {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Json, Reads) {
  const auto v =
      parse(R"( {"a": [1, -2, 9223372036854775807], "b": {"c": "x\n\"A"}, "d": true, "e": null, "f": 1.5e2} )");
  EXPECT_THAT(v.at("a").as_ints(), ElementsAre(1, -2, INT64_MAX));
  EXPECT_EQ(v.at("b").at("c").as_string(), "x\n\"A");
  EXPECT_TRUE(v.at("d").as_bool());
  EXPECT_TRUE(std::holds_alternative<std::nullptr_t>(v.at("e").data()));
  EXPECT_EQ(std::get<double>(v.at("f").data()), 150.0);
  EXPECT_EQ(v.find("g"), nullptr);
  EXPECT_TRUE(parse("[]").as_array().empty());
  EXPECT_TRUE(parse("{}").as_object().empty());
}

TEST(Json, EscapesBecomeUtf8) {
  EXPECT_EQ(parse(R"("\u0041\u00e9\u20ac\ud83d\ude00")").as_string(), "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  EXPECT_EQ(parse("\"\\b\\f\\n\\r\\t\\/\\\\\"").as_string(), "\b\f\n\r\t/\\");
}

TEST(Json, RefusesWhatIsNot) {
  for (const char* text :
       {"", "[1,]", "{\"a\" 1}", "{1: 2}", "[1", "\"abc", "tru", "1 2", "nan", "+1", "\"\\x\"", "[1 2]", "\"\\u12\"",
        "\"\\ud83d\"", "\"\\ud83dx\"", "\"\\ude00\"", "\"\\ud83d\\u0041\"", "1e999"})
    EXPECT_THROW(parse(text), Error) << text;
  EXPECT_THROW(parse(std::string(1000, '[')), Error);
  try {
    parse("[1,\n 2, x]");
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("line 2, column 5"));
  }
  EXPECT_THROW(parse("{}").at("a"), Error);
  EXPECT_THROW(parse("1.5").as_int(), Error);
}

}  // namespace
}  // namespace fsdp::json
