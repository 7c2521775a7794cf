// What the handlers share of calls that produce rows: the attributes and operands of `Production`.
//
//   attributes  activation: string; norm, factor, gain, shift, centred, rounded_first,
//               rounded_second: bool
//   operands    x, and factor [rows, columns], if `factor`; gain [columns], if `gain`; shift
//               [columns], if `shift`

#ifndef JAXFP8_CUDA_PRODUCTION_CALL_H_
#define JAXFP8_CUDA_PRODUCTION_CALL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/buffer_taker.h"
#include "common/status.h"
#include "common/xla_call.h"
#include "cuda/kernels/produce/production.h"

namespace jaxfp8::cuda {

struct ProductionFlags {
  bool norm = false, centred = false, gain = false, shift = false;
};

// Reads the attributes.
inline Status ReadProduction(Reader& read, ProductionFlags& flags, Production& to) {
  std::string_view activation;
  read("activation", activation);
  for (auto [name, flag] :
       {std::pair("norm", &flags.norm), std::pair("gain", &flags.gain),
        std::pair("shift", &flags.shift), std::pair("factor", &to.has_factor),
        std::pair("centred", &flags.centred), std::pair("rounded_first", &to.rounded_first),
        std::pair("rounded_second", &to.rounded_second)}) {
    read(name, *flag);
  }
  JAXFP8_RETURN_IF_ERROR(read.status());
  const Producer norm = flags.centred ? Producer::kLayerNorm : Producer::kRmsNorm;
  to.producer = flags.norm ? norm : Producer::kElementwise;
  to.activation = ParseActivation(activation);
  if (to.activation != Activation::kUnknown) return {};
  return "`activation` is \"" + std::string(activation) + "\", but needs to be one of " +
         kActivationNames;
}

inline void TakeRows(BufferTaker& operand, const Production& p, ProductionBuffers& to) {
  const std::vector<int64_t> matrix{p.rows, p.columns};
  operand("x", p.producer == Producer::kCast ? DType::kF32 : p.in, matrix, to.x);
  if (p.has_factor) operand("factor", p.in, matrix, to.factor);
}

// Takes gain and shift, each of float32 or of the type of x.
inline void TakeVectors(BufferTaker& operand, const ProductionFlags& flags, Production& p,
                        ProductionBuffers& to) {
  const auto take = [&](const char* name, DType& type, const void*& vector) {
    type = operand.NextType() == DType::kF32 ? DType::kF32 : p.in;
    operand(name, type, {p.columns}, vector);
  };
  if (flags.gain) take("gain", p.gain, to.gain);
  if (flags.shift) take("shift", p.shift, to.shift);
}

inline bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

inline bool IsAligned(const ProductionBuffers& b) {
  return IsAligned(b.x) && IsAligned(b.factor) && IsAligned(b.gain) && IsAligned(b.shift);
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_PRODUCTION_CALL_H_
