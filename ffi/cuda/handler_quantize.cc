// The XLA FFI handler `jaxfp8_quantize`: from bfloat16, float16 or float32 to 8 bits.
//
//   operands    x [rows, columns]; scale, if `given_scale`
//   results     codes [rows, columns]; scale, unless `given_scale`; codes_transposed
//               [columns, rows], if `transposed`; amax, if `amax`; workspace [n] of uint8
//   attributes  out_dtype: string; tile_rows, tile_columns: i64, what shares a scale;
//               given_scale, transposed, amax: bool, false where they are not given
//
// Scales and amaxes are float32 of shape ceil([rows, columns] / tile). FP8 codes travel as uint8 or
// typed.

#include <cuda_runtime_api.h>

#include <exception>
#include <string>

#include "common/xla_call.h"
#include "cuda/kernels/quantize.h"

namespace jaxfp8::cuda {
namespace {

using Shape = std::vector<int64_t>;

std::string Say(const std::string& what) { return "`jaxfp8_quantize`: " + what; }

std::string ShapeText(Dims shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

struct Options {
  std::string_view out_dtype;
  int64_t tile_rows = 0, tile_columns = 0;
  bool given_scale = false, transposed = false, amax = false;
};

std::string ReadOptions(ffi::Dictionary attributes, Options& to) {
  Reader read(attributes, "jaxfp8_quantize");
  read("out_dtype", to.out_dtype);
  read("tile_rows", to.tile_rows);
  read("tile_columns", to.tile_columns);
  for (auto [name, flag] : {std::pair("given_scale", &to.given_scale),
                            std::pair("transposed", &to.transposed), std::pair("amax", &to.amax)}) {
    if (attributes.contains(name)) read(name, *flag);
  }
  if (!read.wrong().empty()) return read.wrong();
  if (to.tile_rows >= 1 && to.tile_columns >= 1) return "";
  return Say("attributes `tile_rows` and `tile_columns` are " + std::to_string(to.tile_rows) +
             " and " + std::to_string(to.tile_columns) + ", but need to be at least 1");
}

// Takes buffers in order, and remembers the first that does not fit.
class Taker {
 public:
  explicit Taker(std::vector<Buffer> from) : from_(std::move(from)) {}

  template <typename T>
  void operator()(const char* name, DType dtype, const Shape& shape, T*& to) {
    if (!wrong_.empty()) return;
    if (next_ == from_.size()) {
      wrong_ = Say("`" + std::string(name) + "` is missing");
      return;
    }
    const Buffer& buffer = from_[next_++];
    const bool carries = buffer.dtype == dtype || (IsFloat8(dtype) && buffer.dtype == DType::kU8);
    if (!carries || Shape(buffer.shape.begin(), buffer.shape.end()) != shape) {
      wrong_ = Say("`" + std::string(name) + "` is " + std::string(NameOf(buffer.dtype)) + " of " +
                   ShapeText(buffer.shape) + ", but needs to be " + std::string(NameOf(dtype)) +
                   " of " + ShapeText(shape));
    }
    to = static_cast<T*>(buffer.data);
  }

  // The last one, whatever its size.
  size_t TakeBytes(void*& to) {
    if (!wrong_.empty()) return 0;
    if (next_ + 1 != from_.size() || from_[next_].dtype != DType::kU8 ||
        from_[next_].shape.size() != 1) {
      wrong_ = Say("the last result is not the workspace, but needs to be: a vector of uint8");
      return 0;
    }
    to = from_[next_].data;
    return static_cast<size_t>(from_[next_].shape[0]);
  }

  const std::string& wrong() const { return wrong_; }

 private:
  std::vector<Buffer> from_;
  size_t next_ = 0;
  std::string wrong_;
};

std::string Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attributes) {
  Options options;
  const std::string unread = ReadOptions(attributes, options);
  if (!unread.empty()) return unread;
  const std::vector<Buffer> operands = Describe(args);
  if (operands.empty() || operands[0].shape.size() != 2) return Say("`x` needs two axes");
  QuantizeProblem problem;
  problem.rows = operands[0].shape[0];
  problem.columns = operands[0].shape[1];
  problem.tile_rows = options.tile_rows;
  problem.tile_columns = options.tile_columns;
  problem.in = operands[0].dtype;
  problem.out = ParseDType(options.out_dtype);
  problem.given_scale = options.given_scale;
  problem.transposed = options.transposed;
  problem.amax = options.amax;
  const std::string why_not = QuantizeWhyNot(problem);
  if (!why_not.empty()) return Say(why_not);

  const auto tiles = [](int64_t size, int64_t tile) { return (size + tile - 1) / tile; };
  const Shape shape{problem.rows, problem.columns}, turned{problem.columns, problem.rows};
  const Shape scales{tiles(problem.rows, problem.tile_rows),
                     tiles(problem.columns, problem.tile_columns)};
  QuantizeBuffers buffers;
  Taker operand(operands), result(Describe(rets));
  operand("x", problem.in, shape, buffers.x);
  result("codes", problem.out, shape, buffers.codes);
  (problem.given_scale ? operand : result)("scale", DType::kF32, scales, buffers.scale);
  if (problem.transposed) result("codes_transposed", problem.out, turned, buffers.codes_transposed);
  if (problem.amax) result("amax", DType::kF32, scales, buffers.amax);
  const size_t given = result.TakeBytes(buffers.workspace);
  if (!operand.wrong().empty()) return operand.wrong();
  if (!result.wrong().empty()) return result.wrong();
  if (given < QuantizeWorkspace(problem)) {
    return Say("the workspace has " + std::to_string(given) + " bytes, but needs " +
               std::to_string(QuantizeWorkspace(problem)));
  }
  return LaunchQuantize(problem, buffers, stream);
}

// Nothing is thrown past here.
ffi::Error Quantize(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  try {
    const std::string wrong = Call(stream, args, rets, attributes);
    return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(wrong);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(Say(error.what()));
  }
}

}  // namespace
}  // namespace jaxfp8::cuda

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jaxfp8_quantize(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize, jaxfp8::cuda::Quantize,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<xla::ffi::Dictionary>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop
