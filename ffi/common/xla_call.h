// Reads a call of XLA's FFI into the types of ffi/common. Shared by the handlers of both platforms.
//
// Only handlers include this file; nothing else includes XLA's headers.

#ifndef JAXFP8_COMMON_XLA_CALL_H_
#define JAXFP8_COMMON_XLA_CALL_H_

#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/dtype.h"
#include "common/spec.h"
#include "common/status.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp8 {

namespace ffi = xla::ffi;

inline DType TypeOf(ffi::DataType type) {
#define JAXFP8_TYPE(type, name, xla, ...) \
  case ffi::DataType::xla:                \
    return DType::k##type;
  switch (type) {
    JAXFP8_DTYPES(JAXFP8_TYPE)
    default:
      return DType::kNone;
  }
#undef JAXFP8_TYPE
}

inline Buffer Describe(ffi::AnyBuffer buffer) {
  const auto dims = buffer.dimensions();
  return {TypeOf(buffer.element_type()), Dims(dims.begin(), dims.size()), buffer.untyped_data()};
}

// Reads attributes and remembers the first that is missing or has another type.
class Reader {
 public:
  explicit Reader(ffi::Dictionary from) : from_(from) {}
  // For attributes whose names begin with a prefix.
  static Reader WithPrefix(std::string prefix, ffi::Dictionary from) {
    Reader reader(from);
    reader.prefix_ = std::move(prefix);
    return reader;
  }

  void operator()(const std::string& name, bool& to) { Get<bool>(name, to, "a bool"); }
  void operator()(const std::string& name, int64_t& to) { Get<int64_t>(name, to, "an i64"); }
  void operator()(const std::string& name, float& to) { Get<float>(name, to, "an f32"); }
  void operator()(const std::string& name, std::string_view& to) {
    Get<std::string_view>(name, to, "a string");
  }
  void operator()(const std::string& name, Dims& to) {
    ffi::Span<const int64_t> span;
    Get<ffi::Span<const int64_t>>(name, span, "an array of i64");
    to = Dims(span.begin(), span.size());
  }

  bool Has(const std::string& name) const { return from_.contains(prefix_ + name); }

  const Status& status() const { return status_; }

 private:
  template <typename T>
  void Get(const std::string& name, T& to, const char* needs) {
    const ffi::ErrorOr<T> value = from_.get<T>(prefix_ + name);
    if (value.has_value()) {
      to = *value;
    } else if (status_.ok()) {
      const char* got = Has(name) ? "` has another type" : "` is missing";
      status_ = "attribute `" + prefix_ + name + got + ", but needs to be " + needs;
    }
  }

  ffi::Dictionary from_;
  std::string prefix_;
  Status status_;
};

inline void Read(Reader& read, const std::string& side, OperandSpec& to) {
  read(side + "_dtype", to.dtype);
  read(side + "_shape", to.shape);
  read(side + "_contracting", to.contracting);
  read(side + "_batch", to.batch);
  read(side + "_tiles", to.tiles);
  read(side + "_scale", to.scale);
  read(side + "_zero_point", to.zero_point);
  if (read.Has(side + "_scale_rounded")) read(side + "_scale_rounded", to.scale_rounded);
  if (read.Has(side + "_sums")) read(side + "_sums", to.sums);
}

inline void Read(Reader& read, EpilogueSpec& to) {
  read("has_residual", to.has_residual);
  read("residual", to.residual);
  read("residual_dtype", to.residual_dtype);
  read("has_bias", to.has_bias);
  read("bias", to.bias);
  read("activation", to.activation);
  read("out_dtype", to.out_dtype);
  read("has_out_scale", to.has_out_scale);
  read("out_scale", to.out_scale);
  read("has_amax", to.has_amax);
  read("amax", to.amax);
}

inline void Read(Reader& read, ScaledDotSpec& to) {
  Read(read, "lhs", to.lhs);
  Read(read, "rhs", to.rhs);
  Read(read, to.epilogue);
  read("precision", to.precision);
}

inline Status Read(ffi::Dictionary attributes, Request& to) {
  Reader read(attributes);
  Read(read, to.spec);
  read("kernel", to.kernel);
  return read.status();
}

// The answer to a call: success, or an error that begins with its name. No exception leaves this
// function.
template <class Run>
ffi::Error AnswerOf(const char* call, const Run& run) {
  const auto place = [call] { return "`" + std::string(call) + "`"; };
  try {
    const Status status = run();
    if (status.ok()) return ffi::Error::Success();
    return ffi::Error::InvalidArgument(status.In(place()).message());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, place() + ": no host memory");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(place() + ": " + error.what());
  }
}

inline std::vector<Buffer> Describe(ffi::RemainingArgs args) {
  std::vector<Buffer> operands;
  for (size_t i = 0; i < args.size(); ++i) {
    operands.push_back(Describe(*args.get<ffi::AnyBuffer>(i)));
  }
  return operands;
}

inline std::vector<Buffer> Describe(ffi::RemainingRets rets) {
  std::vector<Buffer> results;
  for (size_t i = 0; i < rets.size(); ++i) {
    results.push_back(Describe(**rets.get<ffi::AnyBuffer>(i)));
  }
  return results;
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_XLA_CALL_H_
