// From finished sums to the output: residual, bias, activation, amax, out_scale, one rounding.

#ifndef JAXFP8_CPU_KERNELS_FINISH_H_
#define JAXFP8_CPU_KERNELS_FINISH_H_

#include <algorithm>
#include <atomic>
#include <limits>

#include "common/activation.h"
#include "common/activation_f32.h"
#include "common/decode.h"
#include "common/encode.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/simd.h"

namespace jaxfp8::JAXFP8_ISA {

// A stretch of one output row.
struct Stretch {
  int64_t batch, row, column;
  int count;

  int64_t Start(const Plane& plane) const { return plane.batch[batch] + plane.rows[row]; }
};

// The plane's values along the stretch: where they lie, or in `room`, where the last one is
// repeated to the end.
template <typename T>
inline const T* Along(const Plane& plane, const Stretch& at, T (&room)[kColumns]) {
  const T* base = static_cast<const T*>(plane.data) + at.Start(plane);
  if (plane.columns.Constant()) {
    std::fill_n(room, kColumns, *base);
    return room;
  }
  if (plane.columns.Contiguous() && at.count == kColumns) return base + at.column;
  for (int i = 0; i < kColumns; ++i) {
    room[i] = base[plane.columns[at.column + std::min(i, at.count - 1)]];
  }
  return room;
}

// Calls `combine(y[i], value)` with the plane's values along the stretch, as float64.
template <typename T, typename Decode, typename Combine>
inline void EachOf(const Plane& plane, const Stretch& at, double* y, Decode decode,
                   Combine combine) {
  T room[kColumns];
  const T* values = Along(plane, at, room);
  for (int i = 0; i < kColumns; ++i) combine(y[i], double{decode(values[i])});
}

template <typename Combine>
inline void Each(const Plane& plane, const Stretch& at, double* y, Combine combine) {
  switch (plane.dtype) {
    case DType::kBF16:
      return EachOf<uint16_t>(plane, at, y, [](uint16_t v) { return DecodeBF16(v); }, combine);
    case DType::kF16:
      return EachOf<uint16_t>(plane, at, y, [](uint16_t v) { return DecodeF16(v); }, combine);
    default:
      return EachOf<float>(plane, at, y, [](float v) { return v; }, combine);
  }
}

inline void AddPlane(const Plane& plane, const Stretch& at, double* y) {
  if (plane.data) Each(plane, at, y, [](double& sum, double value) { sum += value; });
}

inline void DividePlane(const Plane& plane, const Stretch& at, double* y) {
  if (plane.data) Each(plane, at, y, [](double& sum, double value) { sum /= value; });
}

// An activation in float32, where machines multiply and add at once: within its last places, in
// half the time that float64 takes.
template <float (*kNarrow)(float), double (*kWide)(double)>
inline void ActivateBy(double* y) {
#ifdef __FP_FAST_FMAF
  constexpr double kLargest = std::numeric_limits<float>::max();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  float activated[kColumns];
  for (int i = 0; i < kColumns; ++i) {
    const double kept = (y[i] < -kLargest) & (y[i] > -kInfinity) ? -kLargest : y[i];
    activated[i] = kNarrow(static_cast<float>(kept));
  }
  for (int i = 0; i < kColumns; ++i) y[i] = y[i] > kLargest ? y[i] : double{activated[i]};
#else
  for (int i = 0; i < kColumns; ++i) y[i] = kWide(y[i]);
#endif
}

inline void Activate(Activation activation, double* y) {
  switch (activation) {
    case Activation::kRelu:
      for (int i = 0; i < kColumns; ++i) y[i] = Relu(y[i]);
      return;
    case Activation::kGeluTanh:
      return ActivateBy<GeluTanhF32, GeluTanh>(y);
    case Activation::kGeluErf:
      return ActivateBy<GeluErfF32, GeluErf>(y);
    case Activation::kSilu:
      return ActivateBy<SiluF32, Silu>(y);
    default:
      return;
  }
}

// Non-negative floats, and above them NaN, compare like their bits: the maximum does not depend on
// the order in which threads arrive.
inline void RaiseTo(float* amax, uint32_t bits) {
  std::atomic_ref<uint32_t> cell(*reinterpret_cast<uint32_t*>(amax));
  uint32_t seen = cell.load(std::memory_order_relaxed);
  while (seen < bits && !cell.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
  }
}

// The bits of the magnitude of a float, of any NaN the same.
inline uint32_t MagnitudeOf(uint32_t bits) { return bits > 0x7f800000u ? 0x7fc00000u : bits; }

// The greatest magnitudes of one output row, found stretch by stretch.
class RowAmax {
 public:
  RowAmax(const Plane& plane, int64_t batch, int64_t row) : plane_(plane) {
    if (plane.data) cells_ = static_cast<float*>(plane.data) + plane.batch[batch] + plane.rows[row];
  }

  void See(const Stretch& at, const double* y) {
    if (!cells_) return;
    uint32_t bits[kColumns];
    for (int i = 0; i < kColumns; ++i) bits[i] = BitsOf(static_cast<float>(y[i])) & 0x7fffffffu;
    if (!plane_.columns.Constant()) {
      for (int i = 0; i < at.count; ++i) {
        RaiseTo(cells_ + plane_.columns[at.column + i], MagnitudeOf(bits[i]));
      }
      return;
    }
    std::fill(bits + at.count, bits + kColumns, 0);
    for (int i = 0; i < kColumns; ++i) most_[i] = std::max(most_[i], bits[i]);
  }

  void Raise() const {
    if (!cells_ || !plane_.columns.Constant()) return;
    uint32_t most = 0;
    for (uint32_t bits : most_) most = std::max(most, bits);
    RaiseTo(cells_, MagnitudeOf(most));
  }

 private:
  const Plane& plane_;
  float* cells_ = nullptr;
  uint32_t most_[kColumns] = {};
};

#if defined(__AVX512F__)
// Eight values in float32, rounded towards 0, and which of them were not exact.
inline __m256i Truncate(__m512d values, __mmask8& inexact) {
  const __m256 truncated = _mm512_cvt_roundpd_ps(values, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(truncated), values, _CMP_NEQ_UQ);
  return _mm256_castps_si256(truncated);
}
#endif

// As jaxfp8::RoundToOdd, of a stretch.
inline void RoundToOdd(const double* y, float (&odd)[kColumns]) {
#if defined(__AVX512F__)
  for (int i = 0; i < kColumns; i += kLanes) {
    __mmask8 low_inexact, high_inexact;
    const __m256i low = Truncate(Load<__m512d>(y + i), low_inexact);
    const __m256i high = Truncate(Load<__m512d>(y + i + kWide), high_inexact);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    const auto inexact = static_cast<__mmask16>(high_inexact << kWide | low_inexact);
    Store(odd + i, _mm512_mask_or_epi32(both, inexact, both, _mm512_set1_epi32(1)));
  }
#else
  for (int i = 0; i < kColumns; ++i) odd[i] = jaxfp8::RoundToOdd(y[i]);
#endif
}

// Whole vectors where they lie side by side; otherwise the part that is present.
template <typename T, typename Value, typename Encode>
inline void Put(const Plane& out, const Stretch& at, const Value* y, Encode encode) {
  T* base = static_cast<T*>(out.data) + at.Start(out);
  if (out.columns.Contiguous() && at.count == kColumns) {
    for (int i = 0; i < kColumns; ++i) base[at.column + i] = encode(y[i]);
    return;
  }
  T codes[kColumns];
  for (int i = 0; i < kColumns; ++i) codes[i] = encode(y[i]);
  for (int i = 0; i < at.count; ++i) base[out.columns[at.column + i]] = codes[i];
}

// To a type of fewer bits than float32.
template <typename T, T (*kEncode)(float)>
inline void PutNarrow(const Plane& out, const Stretch& at, const double* y) {
  alignas(kBytes) float odd[kColumns];
  RoundToOdd(y, odd);
  Put<T>(out, at, odd, [](float v) { return kEncode(v); });
}

inline void PutAs(const Plane& out, const Stretch& at, const double* y) {
  switch (out.dtype) {
    case DType::kF32:
      return Put<float>(out, at, y, [](double v) { return static_cast<float>(v); });
    case DType::kBF16:
      return PutNarrow<uint16_t, EncodeBF16>(out, at, y);
    case DType::kF16:
      return PutNarrow<uint16_t, EncodeF16>(out, at, y);
    case DType::kE4M3:
      return PutNarrow<uint8_t, EncodeE4M3>(out, at, y);
    case DType::kE5M2:
      return PutNarrow<uint8_t, EncodeE5M2>(out, at, y);
    case DType::kS8:
      return Put<int8_t>(out, at, y, [](double v) { return EncodeS8(v); });
    case DType::kU8:
      return Put<uint8_t>(out, at, y, [](double v) { return EncodeU8(v); });
    default:
      return Put<int32_t>(out, at, y, [](double v) { return EncodeS32(v); });
  }
}

// On whole vectors: what lanes beyond the last are is thrown away.
inline void Finish(const Epilogue& epilogue, int64_t batch, int64_t row, int64_t column,
                   int64_t count, double* sums) {
  RowAmax amax(epilogue.amax, batch, row);
  for (int64_t done = 0; done < count; done += kColumns) {
    const auto width = static_cast<int>(std::min<int64_t>(kColumns, count - done));
    const Stretch at{batch, row, column + done, width};
    double* y = sums + done;
    AddPlane(epilogue.residual, at, y);
    AddPlane(epilogue.bias, at, y);
    Activate(epilogue.activation, y);
    amax.See(at, y);
    DividePlane(epilogue.out_scale, at, y);
    PutAs(epilogue.out, at, y);
  }
  amax.Raise();
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_FINISH_H_
