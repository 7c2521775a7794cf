// The epilogue: y = round(activation(sums + residual + bias) / out_scale), and amax before the
// division. It works in float64 on kNR columns of a row at once, and rounds once:
//
//   float64 sums -> + residual -> + bias -> activation -> amax -> / out_scale -> dtype of the
//   output

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "common/activation.h"
#include "common/activation_f32.h"
#include "common/decode.h"
#include "common/encode.h"
#include "cpu/kernels/gemm/scaled_sums.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/simd/vector.h"

namespace jaxfp8::JAXFP8_ISA {

// The offset of the first column of a span's row in a plane.
inline int64_t StartOf(const EpilogueArray& plane, const OutputSpan& at) {
  return plane.batch[at.batch] + plane.rows[at.row];
}

// kNR columns of a row, in registers on the common path.
struct Values {
  static constexpr int kParts = kNR / kWide;
  F64 part[kParts];
};

// Calls `f(i)` for each vector of the values.
template <typename F>
[[gnu::always_inline]] inline void EachPart(F f) {
#pragma GCC unroll 8
  for (int i = 0; i < Values::kParts; ++i) f(i);
}

inline Values LoadValues(const double* from) {
  Values values;
  EachPart([&](int i) { values.part[i] = Load<F64>(from + i * kWide); });
  return values;
}

inline void StoreValues(double* to, const Values& values) {
  EachPart([&](int i) { Store(to + i * kWide, values.part[i]); });
}

// Rounded to float32.
[[gnu::always_inline]] inline void StoreFloats(float* to, const Values& values) {
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    Store(to + i * kLanes, ToFloats(values.part[2 * i], values.part[2 * i + 1]));
  }
}

// Copies a plane's values along a strided span, or one shorter than kNR: a broadcast value, or one
// by one, with the last repeated to fill `to`.
template <typename T>
[[gnu::noinline]] void Gather(const EpilogueArray& plane, const OutputSpan& at, T* to) {
  const T* base = static_cast<const T*>(plane.data) + StartOf(plane, at);
  if (plane.columns.Constant()) return void(std::fill_n(to, kNR, *base));
  for (int64_t i = 0; i < kNR; ++i) {
    to[i] = base[plane.columns[at.column + std::min(i, at.count - 1)]];
  }
}

inline Values Decoded(const float* from) {
  Values values;
  EachPart([&](int i) { values.part[i] = ToDoubles(Load<HalfF32>(from + i * kWide)); });
  return values;
}

template <float (*kDecode)(uint16_t)>
[[gnu::noinline]] Values Decoded(const uint16_t* from) {
  float decoded[kNR];
  for (int i = 0; i < kNR; ++i) decoded[i] = kDecode(from[i]);
  return Decoded(decoded);
}

template <typename T, Values (*kDecoded)(const T*)>
[[gnu::always_inline]] inline Values ValuesAs(const EpilogueArray& plane, const OutputSpan& at) {
  if (plane.columns.Contiguous() && at.count == kNR) {
    return kDecoded(static_cast<const T*>(plane.data) + StartOf(plane, at) + at.column);
  }
  T room[kNR];
  Gather(plane, at, room);
  return kDecoded(room);
}

// A plane's values along the span, as float64.
[[gnu::always_inline]] inline Values ValuesOf(const EpilogueArray& plane, const OutputSpan& at) {
  switch (plane.dtype) {
    case DType::kBF16:
      return ValuesAs<uint16_t, Decoded<DecodeBF16>>(plane, at);
    case DType::kF16:
      return ValuesAs<uint16_t, Decoded<DecodeF16>>(plane, at);
    default:
      return ValuesAs<float, Decoded>(plane, at);
  }
}

[[gnu::always_inline]] inline void AddArray(const EpilogueArray& plane, const OutputSpan& at,
                                            Values& y) {
  if (!plane.data) return;
  const Values values = ValuesOf(plane, at);
  EachPart([&](int i) { y.part[i] += values.part[i]; });
}

[[gnu::always_inline]] inline void DivideArray(const EpilogueArray& plane, const OutputSpan& at,
                                               Values& y) {
  if (!plane.data) return;
  const Values values = ValuesOf(plane, at);
  EachPart([&](int i) { y.part[i] /= values.part[i]; });
}

// With a fused multiply-add, the activation is computed in float32: accurate to the last bits, and
// 2x faster than float64. Values beyond float32 are computed in float64.
template <float (*kInFloat)(float), double (*kInDouble)(double)>
inline Values ActivatedBy(const Values& y) {
  double wide[kNR];
#ifdef __FP_FAST_FMAF
  constexpr float kLargest = std::numeric_limits<float>::max();
  float in_float[kNR];
  StoreFloats(in_float, y);
  uint32_t most = 0;
  for (int i = 0; i < kNR; ++i) {
    most = std::max(most, BitsOf(in_float[i]) & 0x7fffffffu);
    in_float[i] = kInFloat(in_float[i]);
  }
  if (most <= BitsOf(kLargest)) [[likely]]
    return Decoded(in_float);
  StoreValues(wide, y);
  for (int i = 0; i < kNR; ++i) {
    wide[i] = std::fabs(wide[i]) > double{kLargest} ? kInDouble(wide[i]) : double{in_float[i]};
  }
#else
  StoreValues(wide, y);
  for (int i = 0; i < kNR; ++i) wide[i] = kInDouble(wide[i]);
#endif
  return LoadValues(wide);
}

[[gnu::noinline]] inline Values Activated(Activation activation, const Values& y) {
#define JAXFP8_APPLY(Name, text) \
  if (activation == Activation::k##Name) return ActivatedBy<Name##F32, Name>(y);
  JAXFP8_ACTIVATIONS(JAXFP8_APPLY)
#undef JAXFP8_APPLY
  return y;
}

[[gnu::always_inline]] inline void Activate(Activation activation, Values& y) {
  if (activation == Activation::kNone) return;
  if (activation == Activation::kRelu) {
    EachPart([&](int i) { y.part[i] = y.part[i] < 0.0 ? F64{} : y.part[i]; });
  } else {
    y = Activated(activation, Values(y));
  }
}

// Raises `amax` to the float of these bits. Bits of non-negative floats and of NaN compare like
// integers, so the result does not depend on the order of threads.
inline void RaiseTo(float* amax, uint32_t bits) {
  std::atomic_ref<uint32_t> cell(*reinterpret_cast<uint32_t*>(amax));
  uint32_t seen = cell.load(std::memory_order_relaxed);
  while (seen < bits && !cell.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
  }
}

// The bits of a magnitude, with one pattern for all NaNs.
inline uint32_t MagnitudeOf(uint32_t bits) { return bits > 0x7f800000u ? 0x7fc00000u : bits; }

// The amax of one output row, collected span by span: of the whole row, or of each column.
class RowAmax {
 public:
  RowAmax(const EpilogueArray& plane, const OutputSpan& at) : plane_(plane) {
    if (plane.data) cells_ = static_cast<float*>(plane.data) + StartOf(plane, at);
  }

  [[gnu::noinline]] void See(const OutputSpan& at, const Values& values) {
    double y[kNR];
    StoreValues(y, values);
    uint32_t bits[kNR];
    for (int i = 0; i < kNR; ++i) bits[i] = BitsOf(static_cast<float>(y[i])) & 0x7fffffffu;
    if (!plane_.columns.Constant()) {
      for (int64_t i = 0; i < at.count; ++i) {
        RaiseTo(cells_ + plane_.columns[at.column + i], MagnitudeOf(bits[i]));
      }
      return;
    }
    std::fill(bits + at.count, bits + kNR, 0);
    for (int i = 0; i < kNR; ++i) most_[i] = std::max(most_[i], bits[i]);
  }

  void Raise() const {
    if (!cells_ || !plane_.columns.Constant()) return;
    uint32_t most = 0;
    for (uint32_t bits : most_) most = std::max(most, bits);
    RaiseTo(cells_, MagnitudeOf(most));
  }

 private:
  const EpilogueArray& plane_;
  float* cells_ = nullptr;
  uint32_t most_[kNR] = {};
};

#if defined(__AVX512F__)
// Eight values as float32, rounded towards 0; `inexact` has a bit for each rounded value.
inline __m256i Truncate(__m512d values, __mmask8& inexact) {
  const __m256 truncated = _mm512_cvt_roundpd_ps(values, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(truncated), values, _CMP_NEQ_UQ);
  return _mm256_castps_si256(truncated);
}
#endif

// jaxfp8::RoundToOdd of all values: a later rounding to fewer bits is then rounded once.
inline void RoundToOdd(const Values& y, float (&odd)[kNR]) {
#if defined(__AVX512F__)
  for (int i = 0; i < Values::kParts; i += 2) {
    __mmask8 low_inexact, high_inexact;
    const __m256i low = Truncate((__m512d)y.part[i], low_inexact);
    const __m256i high = Truncate((__m512d)y.part[i + 1], high_inexact);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    const auto inexact = static_cast<__mmask16>(high_inexact << kWide | low_inexact);
    Store(odd + i * kWide, _mm512_mask_or_epi32(both, inexact, both, _mm512_set1_epi32(1)));
  }
#else
  double wide[kNR];
  StoreValues(wide, y);
  for (int i = 0; i < kNR; ++i) odd[i] = jaxfp8::RoundToOdd(wide[i]);
#endif
}

// Calls `fill` on the output if the span is whole and contiguous; otherwise on a copy, and stores
// the copy's existing columns.
template <typename T, typename Fill>
[[gnu::always_inline]] inline void Put(const EpilogueArray& out, const OutputSpan& at, Fill fill) {
  T* base = static_cast<T*>(out.data) + StartOf(out, at);
  if (out.columns.Contiguous() && at.count == kNR) return fill(base + at.column);
  T codes[kNR];
  fill(codes);
  for (int64_t i = 0; i < at.count; ++i) base[out.columns[at.column + i]] = codes[i];
}

// Stores in a dtype narrower than float32.
template <typename T, T (*kEncode)(float)>
inline void PutRounded(const EpilogueArray& out, const OutputSpan& at, const Values& y) {
  alignas(kBytes) float odd[kNR];
  RoundToOdd(y, odd);
  Put<T>(out, at, [&](T* to) {
    for (int i = 0; i < kNR; ++i) to[i] = kEncode(odd[i]);
  });
}

inline void PutIntegers(const EpilogueArray& out, const OutputSpan& at, const Values& y) {
  double wide[kNR];
  StoreValues(wide, y);
  Put<int32_t>(out, at, [&](int32_t* to) {
    for (int i = 0; i < kNR; ++i) to[i] = EncodeS32(wide[i]);
  });
}

[[gnu::noinline]] inline void PutOther(const EpilogueArray& out, const OutputSpan& at,
                                       const Values& y) {
  switch (out.dtype) {
    case DType::kBF16:
      return PutRounded<uint16_t, EncodeBF16>(out, at, y);
    case DType::kF16:
      return PutRounded<uint16_t, EncodeF16>(out, at, y);
    case DType::kE4M3:
      return PutRounded<uint8_t, EncodeE4M3>(out, at, y);
    case DType::kE5M2:
      return PutRounded<uint8_t, EncodeE5M2>(out, at, y);
    case DType::kS8:
      return PutRounded<int8_t, EncodeS8>(out, at, y);
    case DType::kU8:
      return PutRounded<uint8_t, EncodeU8>(out, at, y);
    default:
      return PutIntegers(out, at, y);
  }
}

[[gnu::always_inline]] inline void PutAs(const EpilogueArray& out, const OutputSpan& at,
                                         const Values& y) {
  if (out.dtype != DType::kF32) return PutOther(out, at, Values(y));
  Put<float>(out, at, [&](float* to) { StoreFloats(to, y); });
}

// Applies the epilogue to `values(i)`, kNR columns from the i-th on, and stores them. Lanes beyond
// the last column hold garbage and are never stored. Functions not inlined get a copy: a reference
// would force the values out of registers.
template <typename Source>
[[gnu::always_inline]] inline void StoreFrom(Source values, const Epilogue& epilogue,
                                             const OutputSpan& all) {
  RowAmax amax(epilogue.amax, all);
  for (int64_t done = 0; done < all.count; done += kNR) {
    const int64_t count = std::min<int64_t>(kNR, all.count - done);
    const OutputSpan at{all.batch, all.row, all.column + done, count};
    Values y = values(done);
    AddArray(epilogue.residual, at, y);
    AddArray(epilogue.bias, at, y);
    Activate(epilogue.activation, y);
    if (epilogue.amax.data) amax.See(at, Values(y));
    DivideArray(epilogue.out_scale, at, y);
    PutAs(epilogue.out, at, y);
  }
  amax.Raise();
}

inline void StoreSums(const double* sums, const Epilogue& epilogue, const OutputSpan& at) {
  StoreFrom([&](int64_t done) { return LoadValues(sums + done); }, epilogue, at);
}

template <class Policy>
void StoreScaled(const void* acc_of, const Panel& rows, int row, const Panel& columns,
                 int64_t depth, const double* sums, const Epilogue& epilogue,
                 const OutputSpan& at) {
  const auto* acc = static_cast<const Acc<Policy>*>(acc_of);
  const RowFactors factors(rows, row, depth);
  const auto values = [&](int64_t done) {
    Values y;
    EachPart([&](int part) {
      const int64_t i = done + part * kWide;
      y.part[part] = Scaled(Load<HalfAccVector<Policy>>(acc + i), factors, columns, i);
    });
    if (!sums) return y;
    EachPart([&](int part) { y.part[part] += Load<F64>(sums + done + part * kWide); });
    return y;
  };
  StoreFrom(values, epilogue, at);
}

}  // namespace jaxfp8::JAXFP8_ISA
