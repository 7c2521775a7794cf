// The XLA FFI handler and the C functions: the only file that includes XLA's headers.

#include <cstdint>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "cpu/check.h"
#include "cpu/counters.h"
#include "cpu/features.h"
#include "cpu/float_mode.h"
#include "cpu/route.h"
#include "cpu/run.h"
#include "include/jaxfp8_cpu.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp8 {
namespace {

namespace ffi = xla::ffi;

DType TypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::F8E4M3FN:
      return DType::kE4M3;
    case ffi::DataType::F8E5M2:
      return DType::kE5M2;
    case ffi::DataType::S8:
      return DType::kS8;
    case ffi::DataType::U8:
      return DType::kU8;
    case ffi::DataType::S32:
      return DType::kS32;
    default:
      return DType::kNone;
  }
}

Buffer Describe(ffi::AnyBuffer buffer) {
  const auto dims = buffer.dimensions();
  return {TypeOf(buffer.element_type()), Dims(dims.begin(), dims.size()), buffer.untyped_data()};
}

// Reads attributes, and remembers the first that is not there or of another type.
class Reader {
 public:
  explicit Reader(ffi::Dictionary from) : from_(from) {}

  void operator()(const std::string& name, bool& to) { Get<bool>(name, to, "a bool"); }
  void operator()(const std::string& name, std::string_view& to) {
    Get<std::string_view>(name, to, "a string");
  }
  void operator()(const std::string& name, Dims& to) {
    ffi::Span<const int64_t> span;
    Get<ffi::Span<const int64_t>>(name, span, "an array of i64");
    to = Dims(span.begin(), span.size());
  }

  const std::string& wrong() const { return wrong_; }

 private:
  template <typename T>
  void Get(const std::string& name, T& to, const char* needs) {
    const ffi::ErrorOr<T> value = from_.get<T>(name);
    if (value.has_value()) {
      to = *value;
    } else if (wrong_.empty()) {
      const char* got = from_.contains(name) ? "` has another type" : "` is missing";
      wrong_ = "`jaxfp8_scaled_dot`: attribute `" + name + got + ", but needs to be " + needs;
    }
  }

  ffi::Dictionary from_;
  std::string wrong_;
};

void Read(Reader& read, const std::string& side, OperandSpec& to) {
  read(side + "_dtype", to.dtype);
  read(side + "_shape", to.shape);
  read(side + "_contracting", to.contracting);
  read(side + "_batch", to.batch);
  read(side + "_tiles", to.tiles);
  read(side + "_scale", to.scale);
  read(side + "_zero_point", to.zero_point);
}

void Read(Reader& read, EpilogueSpec& to) {
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

// A whole call, as its attributes state it.
struct Request {
  ScaledDotSpec spec;
  std::string_view kernel;
};

std::string Read(ffi::Dictionary attributes, Request& to) {
  Reader read(attributes);
  Read(read, "lhs", to.spec.lhs);
  Read(read, "rhs", to.spec.rhs);
  Read(read, to.spec.epilogue);
  read("precision", to.spec.precision);
  read("kernel", to.kernel);
  return read.wrong();
}

class XlaPool : public Pool {
 public:
  explicit XlaPool(ffi::ThreadPool& pool) : pool_(pool), threads_(pool.num_threads()) {}

  int64_t threads() const override { return threads_; }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
  int64_t threads_;
};

std::string Compute(ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  Request request;
  std::string wrong = Read(attributes, request);
  if (wrong.empty()) wrong = CheckSpec(request.spec);
  if (!wrong.empty()) return wrong;
  std::vector<Buffer> operands, results;
  for (size_t i = 0; i < args.size(); ++i)
    operands.push_back(Describe(*args.get<ffi::AnyBuffer>(i)));
  for (size_t i = 0; i < rets.size(); ++i) {
    results.push_back(Describe(**rets.get<ffi::AnyBuffer>(i)));
  }
  Buffers buffers;
  wrong = BindBuffers(request.spec, operands, results, buffers);
  if (!wrong.empty()) return wrong;
  XlaPool pool(threads);
  return Run(request.spec, buffers, request.kernel, pool);
}

// Check, route, run. Nothing is thrown past here.
ffi::Error ScaledDot(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attributes) {
  try {
    const FloatMode mode;
    const std::string wrong = Compute(threads, args, rets, attributes);
    return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(wrong);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "`jaxfp8_scaled_dot`: no memory for the panels of a thread");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("`jaxfp8_scaled_dot`: ") + error.what());
  }
}

bool InRange(int kernel) { return kernel >= 0 && kernel < jaxfp8_cpu_kernel_count(); }

}  // namespace
}  // namespace jaxfp8

#pragma GCC visibility push(default)

extern "C" {

XLA_FFI_Error* jaxfp8_scaled_dot(XLA_FFI_CallFrame* call_frame);

const char* jaxfp8_version() { return JAXFP8_VERSION; }

void jaxfp8_ffi_api_version(int* major, int* minor) {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}

const char* jaxfp8_cpu_features() { return jaxfp8::CpuFeatureNames(); }

int jaxfp8_cpu_kernel_count() { return static_cast<int>(jaxfp8::AllKernels().size()); }

const char* jaxfp8_cpu_kernel_name(int kernel) {
  return jaxfp8::InRange(kernel) ? jaxfp8::AllKernels()[kernel]->name : "";
}

int jaxfp8_cpu_kernel_available(int kernel) {
  return jaxfp8::InRange(kernel) && !(jaxfp8::AllKernels()[kernel]->needs & ~jaxfp8::CpuFeatures());
}

uint64_t jaxfp8_cpu_kernel_calls(int kernel) { return jaxfp8::CallsOf(kernel); }

void jaxfp8_cpu_reset_counters() { jaxfp8::ResetCalls(); }

}  // extern "C"

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_scaled_dot, jaxfp8::ScaledDot,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<xla::ffi::Dictionary>());

#pragma GCC visibility pop
