// Reads the custom call `jaxfp8_quantize` into the types of common/quantize.h.
//
//   operands    x [rows, columns]; scale, if `given_scale`
//   results     codes [rows, columns]; scale, unless `given_scale`; codes_transposed
//               [columns, rows], if `transposed`; amax, if `amax`; on a GPU a workspace [n] of
//               uint8
//   attributes  out_dtype: string; tile_rows, tile_columns: i64, what shares a scale;
//               given_scale, transposed, amax: bool, false where they are not given
//
// FP8 codes are typed or uint8. Only handlers include this file, because it includes XLA's headers.

#ifndef JAXFP8_COMMON_QUANTIZE_CALL_H_
#define JAXFP8_COMMON_QUANTIZE_CALL_H_

#include <string>
#include <utility>
#include <vector>

#include "common/quantize.h"
#include "common/xla_call.h"

namespace jaxfp8 {

inline std::string SayQuantize(const std::string& what) { return "`jaxfp8_quantize`: " + what; }

inline std::string ShapeText(Dims shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

// Reads the problem of a call; returns what is wrong with it, "" if nothing is.
inline std::string Read(ffi::Dictionary attributes, const std::vector<Buffer>& operands,
                        QuantizeProblem& to) {
  if (operands.empty() || operands[0].shape.size() != 2) {
    return SayQuantize("`x` needs two axes");
  }
  to.rows = operands[0].shape[0];
  to.columns = operands[0].shape[1];
  to.in = operands[0].dtype;
  Reader read(attributes, "jaxfp8_quantize");
  std::string_view out;
  read("out_dtype", out);
  read("tile_rows", to.tile_rows);
  read("tile_columns", to.tile_columns);
  for (auto [name, flag] : {std::pair("given_scale", &to.given_scale),
                            std::pair("transposed", &to.transposed), std::pair("amax", &to.amax)}) {
    if (read.Has(name)) read(name, *flag);
  }
  if (!read.wrong().empty()) return read.wrong();
  to.out = ParseDType(out);
  return "";
}

// Takes buffers in order and remembers the first that does not match.
class QuantizeTaker {
 public:
  explicit QuantizeTaker(const std::vector<Buffer>& from) : from_(from) {}

  template <typename T>
  void operator()(const char* name, DType dtype, const std::vector<int64_t>& shape, T*& to) {
    if (!wrong_.empty()) return;
    if (next_ == from_.size()) {
      wrong_ = SayQuantize("`" + std::string(name) + "` is missing");
      return;
    }
    const Buffer& buffer = from_[next_++];
    const bool carries = buffer.dtype == dtype || (IsFloat8(dtype) && buffer.dtype == DType::kU8);
    if (!carries || std::vector<int64_t>(buffer.shape.begin(), buffer.shape.end()) != shape) {
      wrong_ = SayQuantize("`" + std::string(name) + "` is " + std::string(NameOf(buffer.dtype)) +
                           " of " + ShapeText(buffer.shape) + ", but needs to be " +
                           std::string(NameOf(dtype)) + " of " + ShapeText(shape));
    }
    to = static_cast<T*>(buffer.data);
  }

  // Takes the last one, of any size.
  size_t TakeBytes(void*& to) {
    if (!wrong_.empty()) return 0;
    if (next_ + 1 != from_.size() || from_[next_].dtype != DType::kU8 ||
        from_[next_].shape.size() != 1) {
      wrong_ =
          SayQuantize("the last result is not the workspace, but needs to be: a vector of uint8");
      return 0;
    }
    to = from_[next_].data;
    return static_cast<size_t>(from_[next_++].shape[0]);
  }

  // Checks that no buffer is left.
  void End(const char* what) {
    if (!wrong_.empty() || next_ == from_.size()) return;
    wrong_ = SayQuantize("the call has " + std::to_string(from_.size()) + " " + what +
                         ", but its attributes ask for " + std::to_string(next_));
  }

  const std::string& wrong() const { return wrong_; }

 private:
  const std::vector<Buffer>& from_;
  size_t next_ = 0;
  std::string wrong_;
};

// Finds the buffers of a problem; returns what is wrong with them, "" if nothing is.
inline std::string BindBuffers(const QuantizeProblem& problem, const std::vector<Buffer>& operands,
                               const std::vector<Buffer>& results, bool workspace,
                               QuantizeBuffers& to) {
  const std::vector<int64_t> shape{problem.rows, problem.columns};
  const std::vector<int64_t> transposed{problem.columns, problem.rows};
  const std::vector<int64_t> tiles{problem.tiles_down(), problem.tiles_across()};
  QuantizeTaker operand(operands), result(results);
  operand("x", problem.in, shape, to.x);
  result("codes", problem.out, shape, to.codes);
  (problem.given_scale ? operand : result)("scale", DType::kF32, tiles, to.scale);
  if (problem.transposed) result("codes_transposed", problem.out, transposed, to.codes_transposed);
  if (problem.amax) result("amax", DType::kF32, tiles, to.amax);
  if (workspace) to.workspace_bytes = result.TakeBytes(to.workspace);
  operand.End("operands");
  result.End("results");
  return operand.wrong().empty() ? result.wrong() : operand.wrong();
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_QUANTIZE_CALL_H_
