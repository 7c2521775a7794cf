// What the quantising kernels do with 16 bytes of x: load them, find the largest magnitude, make
// codes of them and store those.

#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_CHUNK_CUH_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_CHUNK_CUH_

#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/quantize/quotient.cuh"

namespace jaxfp8::cuda {

inline constexpr int kWords = 4;  // 16 bytes of x: what a thread loads at once
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

struct Quantize {
  const void* x;
  float* scale;
  uint8_t *codes, *turned;  // null: not wanted
  float* amax;              // null: not wanted
  uint32_t* found;          // amaxes in the workspace, as bits; null where none are needed
  uint32_t* raised;         // the amax of all, as bits, beside a given scale; null: not wanted
  int64_t rows, columns, tile_rows, tile_columns, across;
  bool x_aligned, codes_aligned, turned_aligned;  // rows begin at multiples of 16 bytes
};

template <DType kIn>
inline constexpr int kValues = 16 / SizeOf(kIn);  // in 16 bytes of x

// Rows that do not begin at multiples of 16 bytes go element by element, out of line: inlined where
// they are unrolled, these two would be most of the code.
template <DType kIn>
__device__ __noinline__ uint4 LoadSlowly(const void* x, int64_t at, int64_t count) {
  uint32_t words[kWords];
  LoadSome(static_cast<const Bits<kIn>*>(x) + at, count, words);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

static __device__ __noinline__ void StoreSlowly(uint8_t* to, int64_t count, uint4 codes) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  StoreRun(to, count, 1, words);
}

// 16 bytes of x, of which the first `count` elements are there; zeros after them. Where rows are
// aligned a run is there as a whole or not at all.
template <DType kIn>
__device__ __forceinline__ void LoadX(const Quantize& q, int64_t at, int64_t count,
                                      uint32_t (&to)[kWords]) {
  uint4 part = {};
  if (count > 0) {
    part = q.x_aligned ? *reinterpret_cast<const uint4*>(static_cast<const Bits<kIn>*>(q.x) + at)
                       : LoadSlowly<kIn>(q.x, at, count);
  }
  to[0] = part.x, to[1] = part.y, to[2] = part.z, to[3] = part.w;
}

// The larger magnitudes of two words, NaN ignored.
template <DType kIn>
__device__ __forceinline__ uint32_t LargerOf(uint32_t largest, uint32_t x) {
  uint32_t result = 0;
  if constexpr (kIn == DType::kF32) {
    result = BitsOf(fmaxf(FloatFromBits(largest), fabsf(FloatFromBits(x))));
  } else if constexpr (kIn == DType::kBF16) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(x & 0x7fff7fffu));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(x & 0x7fff7fffu));
  }
  return result;
}

template <DType kIn>
__device__ __forceinline__ uint32_t LargestOf(const uint32_t (&words)[kWords], uint32_t largest) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) largest = LargerOf<kIn>(largest, words[i]);
  return largest;
}

// The larger of the elements of a word of magnitudes, as the bits of a float32.
template <DType kIn>
__device__ __forceinline__ uint32_t LargestBits(uint32_t word) {
  float values[2] = {};
  DecodeWord<kIn>(word, values);
  return BitsOf(fmaxf(values[0], values[1]));
}

// Infinities do not count, but are rare: only where the maximum is one are the values read again.
template <DType kIn>
__device__ __noinline__ uint32_t LargestFinite(const void* x, int64_t at, int64_t count) {
  const Bits<kIn>* from = static_cast<const Bits<kIn>*>(x) + at;
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = 0; i < kValues<kIn>; ++i) {
    if (i >= count) break;
    const uint32_t bits = BitsOf(Decode<kIn>(from[i])) & 0x7fffffffu;
    if (bits < kInfinityBits) largest = max(largest, bits);
  }
  return largest;
}

// The maximum over `lanes` neighbouring lanes, a power of two.
__device__ __forceinline__ uint32_t MaxOfLanes(uint32_t value, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    value = max(value, __shfl_xor_sync(~0u, value, step));
  }
  return value;
}

// The maximum over the `group` threads that share threadIdx.x / group; 32 or more, for all warps
// together. `shared` holds a word per warp.
__device__ __forceinline__ uint32_t MaxOfGroup(uint32_t value, int group, uint32_t* shared) {
  value = __reduce_max_sync(~0u, value);
  if (group == 32) return value;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  const int warps = group / 32, first = threadIdx.x / group * warps;
  const int lane = threadIdx.x % 32;
  return __reduce_max_sync(~0u, lane < warps ? shared[first + lane] : 0u);
}

template <DType kIn, DType kOut>
__device__ __forceinline__ void ToCodes(const uint32_t (&x)[kWords], Divisor divisor,
                                        uint32_t (&codes)[kValues<kIn> / 4]) {
  float values[kValues<kIn>];
#pragma unroll
  for (int i = 0; i < kWords; ++i) DecodeWord<kIn>(x[i], values + i * kPerWord<kIn>);
#pragma unroll
  for (float& value : values) value = Quotient(value, divisor);
#pragma unroll
  for (int i = 0; i < kValues<kIn> / 4; ++i) codes[i] = EncodeWord<kOut>(values + 4 * i);
}

// Up to 16 codes, of which `count` are there; where rows are aligned, all or none.
template <int kCodeWords>
__device__ __forceinline__ void StoreCodes(uint8_t* to, int64_t count, bool aligned,
                                           const uint32_t (&codes)[kCodeWords]) {
  if (!aligned) {
    uint32_t all[4] = {};
#pragma unroll
    for (int i = 0; i < kCodeWords; ++i) all[i] = codes[i];
    StoreSlowly(to, min(count, int64_t{4 * kCodeWords}),
                make_uint4(all[0], all[1], all[2], all[3]));
  } else if constexpr (kCodeWords == 4) {
    *reinterpret_cast<uint4*>(to) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
  } else if constexpr (kCodeWords == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
  } else {
    *reinterpret_cast<uint32_t*>(to) = codes[0];
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_CHUNK_CUH_
