#include "checkpoint/collective_call.h"

#include <algorithm>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "json/json.h"
#include "json/text.h"
#include "runtime/texts.h"

namespace fsdp::detail {
namespace {

enum class Kind : char { kValue = 'V', kState = 'S', kCheckpoint = 'C' };

/// The error as it travels: its kind, then its text.
std::string encoded(const std::exception_ptr& error) {
  auto text = [](Kind kind, const char* what) { return fmt::format("{}{}", static_cast<char>(kind), what); };
  try {
    std::rethrow_exception(error);
  } catch (const ValueError& e) {
    return text(Kind::kValue, e.what());
  } catch (const StateError& e) {
    return text(Kind::kState, e.what());
  } catch (const c10::Error& e) {
    return text(Kind::kCheckpoint, e.what_without_backtrace());
  } catch (const std::exception& e) {
    return text(Kind::kCheckpoint, e.what());
  } catch (...) {
    return text(Kind::kCheckpoint, "an exception that is no std::exception");
  }
}

[[noreturn]] void raise(Kind kind, const std::string& text) {
  if (kind == Kind::kValue) throw ValueError(text);
  if (kind == Kind::kState) throw StateError(text);
  throw CheckpointError(text);
}

}  // namespace

CollectiveCall::CollectiveCall(std::shared_ptr<World> world, const char* name) : world_(std::move(world)), name_(name) {
  if (world_ && world_->size() == 1) world_ = nullptr;
  if (world_ && world_->control().backend() == "fake")
    throw StateError(fmt::format("{}: the other ranks of this world do not exist", name_));
}

void CollectiveCall::agree(const std::exception_ptr& error) {
  const auto mine = error ? encoded(error) : std::string();
  const auto all = world_ ? exchange_texts(world_->control(), mine, name_) : std::vector<std::string>{mine};
  const auto failed = std::find_if(all.begin(), all.end(), [](const auto& text) { return !text.empty(); });
  if (failed == all.end()) return;
  const auto kind = static_cast<Kind>(failed->front());
  if (std::all_of(all.begin(), all.end(), [&](const auto& text) { return text == *failed; }))
    raise(kind, fmt::format("{}: {}", name_, failed->substr(1)));
  // Each text once, with the first rank that met it.
  std::vector<std::string> texts;
  constexpr size_t kMost = 8;
  for (auto it = failed; it != all.end() && texts.size() < kMost; ++it)
    if (!it->empty() && std::find(all.begin(), it, *it) == it)
      texts.push_back(fmt::format("rank {}: {}", it - all.begin(), it->substr(1)));
  raise(kind, fmt::format("{}: {}", name_, fmt::join(texts, "\n")));
}

std::vector<std::vector<std::string>> CollectiveCall::exchange(const std::vector<std::string>& mine) {
  if (!world_) return {mine};
  std::vector<std::string> items;
  for (const auto& item : mine) items.push_back(json::quoted(item));
  const auto text = fmt::format("[{}]", fmt::join(items, ","));
  if (same_everywhere(world_->control(), text, name_)) return {mine};
  std::vector<std::vector<std::string>> lists;
  for (const auto& other : exchange_texts(world_->control(), text, name_)) {
    const auto document = json::parse(other);
    auto& list = lists.emplace_back();
    for (const auto& item : document.as_array()) list.push_back(item.as_string());
  }
  return lists;
}

std::set<std::string> CollectiveCall::union_of(const std::vector<std::string>& mine) {
  std::set<std::string> all;
  for (const auto& list : exchange(mine)) all.insert(list.begin(), list.end());
  return all;
}

void CollectiveCall::require_same(const std::string& value, const char* what) {
  const auto lists = exchange({value});
  for (size_t r = 1; r < lists.size(); ++r)
    if (lists[r] != lists[0])
      throw ValueError(fmt::format("{}: expected the same {} on all ranks; rank 0 has '{}', rank {} has '{}'", name_,
                                   what, lists[0][0], r, lists[r][0]));
}

}  // namespace fsdp::detail
