// The calls of XLA's FFI that this process has seen, so that a repeated call costs the host little.
//
// XLA calls the handler whenever a program runs, or is captured into a graph anew. So a call is
// checked once. A later one whose attributes and buffers are the same bytes, all but the data, only
// takes its data. On a Xeon that takes 1.8 us; reading the attributes alone takes 1.9.
//
// Only the handlers of scaled dots include this file.

#ifndef JAXFP8_CUDA_KNOWN_CALLS_H_
#define JAXFP8_CUDA_KNOWN_CALLS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/check.h"
#include "common/status.h"
#include "common/xla_call.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {

// The bytes of all that a call says besides its data: device, attributes, types and shapes.
class CallKey {
 public:
  CallKey(int device, ffi::Dictionary attributes, const std::vector<Buffer>& operands,
          const std::vector<Buffer>& results) {
    text_.reserve(1024);
    Add(device);
    for (auto it = attributes.begin(); it != attributes.end(); ++it) AddAttribute(attributes, it);
    for (const auto* buffers : {&operands, &results}) {
      Add(static_cast<int64_t>(buffers->size()));
      for (const Buffer& buffer : *buffers) {
        Add(static_cast<int64_t>(buffer.dtype));
        Add(buffer.shape);
      }
    }
  }

  const std::string& text() const { return text_; }

 private:
  void Add(int64_t value) { text_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void Add(std::string_view value) {
    Add(static_cast<int64_t>(value.size()));
    text_ += value;
  }
  void Add(Dims values) {
    Add(static_cast<int64_t>(values.size()));
    text_.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
  }

  // Its name, a letter for its type, and its value.
  void AddAttribute(ffi::Dictionary attributes, const ffi::Dictionary::Iterator& it) {
    Add(*it);
    if (attributes.isa<std::string_view>(it)) {
      text_ += 's';
      Add(*attributes.get<std::string_view>(*it));
    } else if (attributes.isa<bool>(it)) {
      text_ += *attributes.get<bool>(*it) ? 't' : 'f';
    } else if (const auto values = attributes.get<ffi::Span<const int64_t>>(*it);
               values.has_value()) {
      text_ += 'a';
      Add(Dims(values->begin(), values->size()));
    } else {
      text_ += '?';  // of a type that no attribute of ours has: refused, or not read
    }
  }

  std::string text_;
};

// Which buffer of a product each operand and result is.
struct Slots {
  std::vector<Slot> operands, results;

  // The data of a call with the same key.
  //   operand, result  the first of each
  jaxfp8::Buffers Bind(const Buffer* operand, const Buffer* result) const {
    jaxfp8::Buffers buffers;
    for (const Slot slot : operands) buffers.*slot = (operand++)->data;
    for (const Slot slot : results) buffers.*slot = (result++)->data;
    return buffers;
  }
};

// The calls that were checked, each with what it takes to run it.
template <class KnownCall>
class KnownCalls {
 public:
  // Finds the call of such arguments on the current device, or has `check` make it. It lives as
  // long as the process.
  //   check  a status, given all arguments and a KnownCall to fill
  template <class Check>
  Status FindOrCheck(ffi::Dictionary attributes, const std::vector<Buffer>& operands,
                     const std::vector<Buffer>& results, Check check, const KnownCall*& known) {
    int device = 0;
    JAXFP8_RETURN_IF_ERROR(CudaError(cudaGetDevice(&device), "cudaGetDevice"));
    const CallKey key(device, attributes, operands, results);
    known = Find(key.text());
    if (known) return {};
    KnownCall checked;
    JAXFP8_RETURN_IF_ERROR(check(attributes, operands, results, checked));
    known = Keep(key.text(), std::move(checked));
    return {};
  }

 private:
  const KnownCall* Find(const std::string& key) {
    const std::shared_lock lock(mutex_);
    const auto found = calls_.find(key);
    return found == calls_.end() ? nullptr : found->second.get();
  }

  // The call kept under a key, which another thread may have kept first.
  const KnownCall* Keep(const std::string& key, KnownCall call) {
    const std::unique_lock lock(mutex_);
    auto& kept = calls_[key];
    if (!kept) kept = std::make_unique<const KnownCall>(std::move(call));
    return kept.get();
  }

  std::shared_mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<const KnownCall>> calls_;
};

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KNOWN_CALLS_H_
