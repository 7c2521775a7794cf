// Reads the custom call `jaxfp8_quantize` into the types of common/quantize.h.
//
//   operands    x [rows, columns]; scale, if `given_scale`
//   results     codes [rows, columns]; scale, unless `given_scale`; codes_transposed
//               [columns, rows], if `transposed`; its scale, if `transposed_scale`; amax, if
//               `amax`; on a GPU a workspace [n] of uint8
//   attributes  out_dtype: string; tile_rows, tile_columns: i64, what shares a scale;
//               given_scale, transposed, transposed_scale, amax, power_of_two: bool, false where
//               they are not given
//
// FP8 codes are typed or uint8. Only handlers include this file, because it includes XLA's headers.

#pragma once

#include <utility>
#include <vector>

#include "common/buffer_taker.h"
#include "common/quantize.h"
#include "common/status.h"
#include "common/xla_call.h"

namespace jaxfp8 {

// Reads the problem of a call.
inline Status Read(ffi::Dictionary attributes, const std::vector<Buffer>& operands,
                   QuantizeProblem& to) {
  if (operands.empty() || operands[0].shape.size() != 2) {
    return "`x` needs two axes";
  }
  to.rows = operands[0].shape[0];
  to.columns = operands[0].shape[1];
  to.in = operands[0].dtype;
  Reader read(attributes);
  std::string_view out;
  read("out_dtype", out);
  read("tile_rows", to.tile_rows);
  read("tile_columns", to.tile_columns);
  for (auto [name, flag] :
       {std::pair("given_scale", &to.given_scale), std::pair("transposed", &to.transposed),
        std::pair("transposed_scale", &to.transposed_scale), std::pair("amax", &to.amax),
        std::pair("power_of_two", &to.power_of_two)}) {
    if (read.Has(name)) read(name, *flag);
  }
  to.out = ParseDType(out);
  return read.status();
}

// Finds and checks the buffers of a problem.
inline Status BindBuffers(const QuantizeProblem& problem, const std::vector<Buffer>& operands,
                          const std::vector<Buffer>& results, bool workspace, QuantizeBuffers& to) {
  const std::vector<int64_t> shape{problem.rows, problem.columns};
  const std::vector<int64_t> transposed{problem.columns, problem.rows};
  const std::vector<int64_t> tiles{problem.tiles_down(), problem.tiles_across()};
  BufferTaker operand(operands), result(results);
  operand("x", problem.in, shape, to.x);
  result("codes", problem.out, shape, to.codes);
  (problem.given_scale ? operand : result)("scale", DType::kF32, tiles, to.scale);
  if (problem.transposed) result("codes_transposed", problem.out, transposed, to.codes_transposed);
  if (problem.transposed_scale) {
    const std::vector<int64_t> lines{problem.columns, problem.transposed_tiles()};
    result("scale of codes_transposed", DType::kF32, lines, to.transposed_scale);
  }
  if (problem.amax) result("amax", DType::kF32, tiles, to.amax);
  if (workspace) to.workspace_bytes = result.TakeBytes(to.workspace);
  JAXFP8_RETURN_IF_ERROR(operand.End("operands"));
  return result.End("results");
}

}  // namespace jaxfp8
