// Takes the buffers of a custom call one after the other, and says which does not fit.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/dtype.h"
#include "common/status.h"

namespace jaxfp8 {

inline constexpr char kNoWorkspace[] =
    "the last result is not the workspace, but on CUDA needs to be: a vector of uint8";
inline bool IsWorkspace(const Buffer& buffer) {
  return buffer.dtype == DType::kU8 && buffer.shape.size() == 1;
}

// Takes buffers in order and remembers the first that does not match.
class BufferTaker {
 public:
  explicit BufferTaker(const std::vector<Buffer>& from) : from_(from) {}

  template <typename T>
  void operator()(const char* name, DType dtype, const std::vector<int64_t>& shape, T*& to) {
    if (!status_.ok()) return;
    if (next_ == from_.size()) {
      status_ = "`" + std::string(name) + "` is missing";
      return;
    }
    const Buffer& buffer = from_[next_++];
    const bool carries = buffer.dtype == dtype || (IsFloat8(dtype) && buffer.dtype == DType::kU8);
    if (!carries || std::vector<int64_t>(buffer.shape.begin(), buffer.shape.end()) != shape) {
      status_ = "`" + std::string(name) + "` is " + std::string(NameOf(buffer.dtype)) + " of " +
                ShapeText(buffer.shape) + ", but needs to be " + std::string(NameOf(dtype)) +
                " of " + ShapeText(shape);
    }
    to = static_cast<T*>(buffer.data);
  }

  // Takes the last one, of any size.
  size_t TakeBytes(void*& to) {
    if (!status_.ok()) return 0;
    if (next_ + 1 != from_.size() || !IsWorkspace(from_[next_])) {
      status_ = kNoWorkspace;
      return 0;
    }
    to = from_[next_].data;
    return static_cast<size_t>(from_[next_++].shape[0]);
  }

  // The type of the next one, if there is one.
  DType NextType() const { return next_ < from_.size() ? from_[next_].dtype : DType::kNone; }

  // Its shape.
  Dims NextShape() const { return next_ < from_.size() ? from_[next_].shape : Dims(); }

  // The first failure so far.
  const Status& status() const { return status_; }

  // Checks that no buffer is left; returns the first failure.
  const Status& End(const char* what) {
    if (!status_.ok() || next_ == from_.size()) return status_;
    status_ = "the call has " + std::to_string(from_.size()) + " " + what +
              ", but its attributes ask for " + std::to_string(next_);
    return status_;
  }

 private:
  const std::vector<Buffer>& from_;
  size_t next_ = 0;
  Status status_;
};

}  // namespace jaxfp8
