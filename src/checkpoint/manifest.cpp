#include "checkpoint/manifest.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "checkpoint/dtypes.h"
#include "checkpoint/values.h"
#include "json/json.h"
#include "json/text.h"

namespace fsdp::detail {
namespace {

constexpr const char* kFormat = "fsdp-checkpoint";
constexpr int64_t kVersion = 1;

/// A JSON object from a map; `text` writes a value, given its key.
template <class Map, class Text>
std::string object(const Map& map, Text&& text, const char* separator = ",") {
  std::string s = "{";
  for (const auto& [key, value] : map)
    s += fmt::format("{}{}:{}", s.size() == 1 ? "" : separator, json::quoted(key), text(key, value));
  return s + "}";
}

std::string tensor_text(const std::string& name, const StoredTensor& t) {
  std::string pieces;
  for (const auto& p : t.pieces)
    pieces += fmt::format("{}[{},{},{},{}]", pieces.empty() ? "" : ",", json::quoted(p.file), p.rows.begin, p.rows.end,
                          p.offset);
  return fmt::format(R"({{"dtype":"{}","shape":[{}],"pieces":[{}]}})", dtype_name(t.dtype, name),
                     fmt::join(t.shape, ","), pieces);
}

StoredTensor tensor_from(const json::Value& v) {
  StoredTensor t;
  t.dtype = dtype_named(v.at("dtype").as_string());
  if (t.dtype == at::ScalarType::Undefined)
    throw json::Error(fmt::format("dtype {} is not known", v.at("dtype").as_string()));
  t.shape = v.at("shape").as_ints();
  for (const auto& item : v.at("pieces").as_array()) {
    const auto& p = item.as_array();
    if (p.size() != 4) throw json::Error("JSON: expected a piece of four entries");
    t.pieces.push_back({p[0].as_string(), {p[1].as_int(), p[2].as_int()}, p[3].as_int()});
  }
  return t;
}

std::string value_text(const std::string&, const c10::IValue& v) { return to_json(v); }
std::string quoted_text(const std::string&, const std::string& text) { return json::quoted(text); }

void merge(std::map<std::string, StoredTensor>& into, const std::string& name, const StoredTensor& part,
           const std::string& what, const std::string& whose) {
  const auto [it, fresh] = into.emplace(name, part);
  if (fresh) return;
  auto& whole = it->second;
  if (whole.shape != part.shape || whole.dtype != part.dtype)
    throw CheckpointError(
        fmt::format("{} is {} on {}, and {} on a rank before it; give CheckpointOptions::name to tell "
                    "different tensors apart",
                    what, part.describe(), whose, whole.describe()));
  whole.pieces.insert(whole.pieces.end(), part.pieces.begin(), part.pieces.end());
}

template <class Map>
void merge_equal(Map& into, const Map& part, const std::string& what, const std::string& whose) {
  for (const auto& [key, value] : part)
    if (const auto [it, fresh] = into.emplace(key, value); !fresh && it->second != value)
      throw CheckpointError(fmt::format("{} '{}' has another value on {} than on a rank before it", what, key, whose));
}

}  // namespace

void Manifest::add(const Manifest& part, const std::string& whose) {
  for (const auto& [name, t] : part.tensors) merge(tensors, name, t, fmt::format("'{}'", name), whose);
  merge_equal(aliases, part.aliases, "the name", whose);
  merge_equal(files, part.files, "the file", whose);
  for (const auto& [name, p] : part.optimizer) {
    auto& own = optimizer[name];
    own.has_state |= p.has_state;
    for (const auto& [key, t] : p.rows)
      merge(own.rows, key, t, fmt::format("the optimizer's '{}' of '{}'", key, name), whose);
    merge_equal(own.values, p.values, fmt::format("of '{}', the optimizer's", name), whose);
    merge_equal(own.options, p.options, fmt::format("of '{}', the option", name), whose);
  }
}

void Manifest::check_names() const {
  for (const auto& [alias, name] : aliases)
    if (tensors.contains(alias))
      throw CheckpointError(fmt::format(
          "'{}' is another name of '{}' on one rank, and a tensor of its own on another; tie it on all or on none",
          alias, name));
}

void Manifest::check_pieces(const std::string& where) {
  auto check = [&](StoredTensor& t, const std::string& what) {
    const auto fail = [&](const std::string& why) {
      throw CheckpointError(fmt::format("{} is damaged: {} {}", where, what, why));
    };
    if (!t.has_size()) fail(fmt::format("has no possible shape ({})", t.describe()));
    for (const auto& piece : t.pieces) {
      const auto file = files.find(piece.file);
      if (file == files.end()) fail(fmt::format("is in a file that the checkpoint has not ('{}')", piece.file));
      const auto& r = piece.rows;
      if (r.begin < 0 || r.end <= r.begin || r.end > t.rows() || piece.offset < 0 ||
          (r.end - r.begin) * t.row_bytes() > file->second - piece.offset)
        fail(fmt::format("has no rows [{}, {}) at byte {} of '{}'", r.begin, r.end, piece.offset, piece.file));
    }
    if (const auto row = t.uncovered_row(); row >= 0) fail(fmt::format("has row {} not exactly once", row));
  };
  if (world_size < 1) throw CheckpointError(fmt::format("{} is damaged: it is of {} ranks", where, world_size));
  for (const auto& [name, size] : files)
    if (name.empty() || name.find('/') != std::string::npos || size < 0)
      throw CheckpointError(fmt::format("{} is damaged: '{}' is no file of {} bytes", where, name, size));
  for (auto& [name, t] : tensors) check(t, fmt::format("'{}'", name));
  for (auto& [name, p] : optimizer)
    for (auto& [key, t] : p.rows) check(t, fmt::format("the optimizer's '{}' of '{}'", key, name));
}

void Manifest::check_complete() {
  check_names();
  auto check = [](StoredTensor& t, const std::string& what) {
    if (const auto row = t.uncovered_row(); row >= 0)
      throw CheckpointError(
          fmt::format("{}: row {} was not written exactly once; do all ranks have the same model?", what, row));
  };
  for (auto& [name, t] : tensors) check(t, fmt::format("'{}'", name));
  for (auto& [name, p] : optimizer)
    for (auto& [key, t] : p.rows) check(t, fmt::format("the optimizer's '{}' of '{}'", key, name));
}

const std::string& Manifest::stored_name(const std::string& name) const {
  const auto it = aliases.find(name);
  return it == aliases.end() ? name : it->second;
}

const StoredTensor* Manifest::find(const std::string& name) const {
  const auto it = tensors.find(stored_name(name));
  return it == tensors.end() ? nullptr : &it->second;
}

std::string Manifest::to_json() const {
  // Most parameters have the same options: each set is written once.
  std::vector<std::string> options;
  const auto parameters = object(
      optimizer,
      [&](const std::string&, const Parameter& p) {
        const auto mine = object(p.options, value_text);
        auto it = std::find(options.begin(), options.end(), mine);
        if (it == options.end()) it = options.insert(options.end(), mine);
        const auto head = fmt::format(R"({{"options":{})", it - options.begin());
        if (!p.has_state) return head + "}";
        return fmt::format(R"({},"values":{},"rows":{}}})", head, object(p.values, value_text),
                           object(p.rows, tensor_text));
      },
      ",\n");
  return fmt::format(
      "{{\"format\":\"{}\",\"version\":{},\"id\":{},\"world_size\":{},\n\"notes\":{},\n\"files\":{},\n"
      "\"aliases\":{},\n\"tensors\":{},\n\"options\":[{}],\n\"optimizer\":{}}}\n",
      kFormat, kVersion, json::quoted(id), world_size, object(notes, quoted_text),
      object(files, [](const auto&, int64_t n) { return std::to_string(n); }), object(aliases, quoted_text),
      object(tensors, tensor_text, ",\n"), fmt::join(options, ",\n"), parameters);
}

Manifest Manifest::from_json(std::string_view text, const std::string& where) {
  try {
    const auto document = json::parse(text);
    if (document.at("format").as_string() != kFormat) throw json::Error("not a manifest of this library");
    if (const auto version = document.at("version").as_int(); version != kVersion)
      throw json::Error(fmt::format("version {}, and this library reads version {}", version, kVersion));
    Manifest m;
    m.id = document.at("id").as_string();
    m.world_size = document.at("world_size").as_int();
    for (const auto& [k, v] : document.at("notes").as_object()) m.notes[k] = v.as_string();
    for (const auto& [k, v] : document.at("files").as_object()) m.files[k] = v.as_int();
    for (const auto& [k, v] : document.at("aliases").as_object()) m.aliases[k] = v.as_string();
    for (const auto& [k, v] : document.at("tensors").as_object()) m.tensors[k] = tensor_from(v);
    const auto& options = document.at("options").as_array();
    for (const auto& [name, v] : document.at("optimizer").as_object()) {
      auto& p = m.optimizer[name];
      const auto set = v.at("options").as_int();
      if (set < 0 || set >= static_cast<int64_t>(options.size())) throw json::Error("no such set of options");
      for (const auto& [k, o] : options[static_cast<size_t>(set)].as_object()) p.options[k] = from_json_value(o);
      const auto* rows = v.find("rows");
      p.has_state = rows != nullptr;
      if (!rows) continue;
      for (const auto& [k, t] : rows->as_object()) p.rows[k] = tensor_from(t);
      for (const auto& [k, o] : v.at("values").as_object()) p.values[k] = from_json_value(o);
    }
    return m;
  } catch (const json::Error& e) {
    throw CheckpointError(fmt::format("{}: {}", where, e.what()));
  }
}

}  // namespace fsdp::detail
