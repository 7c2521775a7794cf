// What this process makes once and keeps, each under the bytes of all that it depends on.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "common/spec.h"

namespace jaxfp8::cuda {

// The bytes of numbers, texts and lists.
class Key {
 public:
  Key() { text_.reserve(1024); }

  void operator()(int64_t value) { Append(&value, sizeof(value)); }
  void operator()(std::string_view value) {
    (*this)(static_cast<int64_t>(value.size()));
    text_ += value;
  }
  void operator()(Dims values) {
    (*this)(static_cast<int64_t>(values.size()));
    Append(values.data(), values.size_bytes());
  }

  const std::string& text() const { return text_; }

 private:
  void Append(const void* from, size_t size) { text_.append(static_cast<const char*>(from), size); }

  std::string text_;
};

// Values by key. They live as long as the process: a program may still run when it ends.
template <class Value>
class Kept {
 public:
  static Kept& OfProcess() {
    static auto* kept = new Kept;
    return *kept;
  }

  const Value* Find(const Key& key) {
    const std::shared_lock lock(mutex_);
    const auto found = values_.find(key.text());
    return found == values_.end() ? nullptr : found->second.get();
  }

  // The value kept under a key: another thread may have kept one first.
  const Value* Keep(const Key& key, std::unique_ptr<const Value> value) {
    const std::unique_lock lock(mutex_);
    auto& kept = values_[key.text()];
    if (!kept) kept = std::move(value);
    return kept.get();
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<const Value>> values_;
};

}  // namespace jaxfp8::cuda
