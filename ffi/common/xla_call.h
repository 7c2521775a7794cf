// Reads a call of XLA's FFI into the types of ffi/common. Shared by the handlers of both platforms.
//
// Only handlers include this file; nothing else includes XLA's headers.

#pragma once

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

inline void Read(Reader& read, ScaledDotSpec& to) {
  const auto side = [&](const std::string& prefix, OperandSpec& spec) {
    EachFieldOfSide(spec, [&](const std::string& field, auto& value) {
      const bool optional =
          field == "scale_rounded" || field == "sums" || field == "scale_exponents";
      if (!optional || read.Has(prefix + field)) read(prefix + field, value);
    });
  };
  side("lhs_", to.lhs);
  side("rhs_", to.rhs);
  EachFieldOfEpilogue(to.epilogue, read);
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

// Defines the XLA FFI handler `name`. It answers with the status of `Call`, given what the platform
// lends, all operands, all results and all attributes. CUDA graphs can capture those for CUDA.
#define JAXFP8_CPU_HANDLER(name, Call) JAXFP8_HANDLER(name, Call, xla::ffi::ThreadPool)
#define JAXFP8_CUDA_HANDLER(name, Call)                              \
  JAXFP8_HANDLER(name, Call, xla::ffi::PlatformStream<cudaStream_t>, \
                 {xla::ffi::Traits::kCmdBufferCompatible})
//   Lent  what the platform lends; traits of the handler may follow
#define JAXFP8_HANDLER(name, Call, Lent, ...)                                                  \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame*);   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                               \
      name,                                                                                    \
      [](auto... given) { return ::jaxfp8::AnswerOf(#name, [&] { return Call(given...); }); }, \
      xla::ffi::Ffi::Bind().Ctx<Lent>().RemainingArgs().RemainingRets().Attrs<xla::ffi::Dictionary>(), ##__VA_ARGS__)

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
