// What the quantizing kernels do with a chunk, 16 bytes of x: load it, find the largest magnitude,
// divide by the scale, encode, and store the codes. And their arguments.

#pragma once

#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/quantize/quotient.cuh"

namespace jaxfp8::cuda {

inline constexpr int kQuantizeThreads = 256;
inline constexpr int kWords = 4;  // of a chunk
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

// Null pointers stand for what is not asked for.
struct QuantizeArguments {
  const void* x;
  float* scale;
  uint8_t *codes, *transposed;  // null: not wanted
  float* transposed_scale;      // null: `transposed` has the same scales
  float* amax;                  // null: not wanted
  uint32_t* found_amax;         // amaxes in the workspace, as bits; null where none are needed
  uint32_t* tensor_amax;        // the amax of all, as bits, beside a given scale; null: not wanted
  int64_t rows, columns, tile_rows, tile_columns, tiles_across;
  bool power_of_two;                                  // of a computed scale
  bool x_aligned, codes_aligned, transposed_aligned;  // rows begin at multiples of 16 bytes
};

// Sums and maxima over the threads of a row.

// Reduces a value over the `group` threads, 32 to 1024, of one threadIdx.x / group. Every thread of
// the CTA must call it.
//   shared         a word per warp, no longer read by anyone
//   reduce_warp    reduces over a warp, for all its lanes; 0 is neutral
template <typename T, typename ReduceWarp>
__device__ __forceinline__ T ReduceGroup(T value, int group, T* shared, ReduceWarp reduce_warp) {
  value = reduce_warp(value);
  if (group == 32) return value;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  const int warps = group / 32, first = threadIdx.x / group * warps;
  const int lane = threadIdx.x % 32;
  return reduce_warp(lane < warps ? shared[first + lane] : T{0});
}

__device__ __forceinline__ uint32_t MaxOfGroup(uint32_t value, int group, uint32_t* shared) {
  return ReduceGroup(value, group, shared, [](uint32_t x) { return __reduce_max_sync(~0u, x); });
}

// Sums in one order.
__device__ __forceinline__ float SumOfGroup(float value, int group, float* shared) {
  return ReduceGroup(value, group, shared, [](float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
  });
}

template <DType kIn>
inline constexpr int kValues = 16 / SizeOf(kIn);  // in 16 bytes of x

// Rows that do not begin at multiples of 16 bytes are loaded and stored element by element. Not
// inlined: in unrolled loops these two would be most of the code.
template <DType kIn>
__device__ __noinline__ uint4 LoadUnaligned(const void* x, int64_t at, int64_t count) {
  uint32_t words[kWords];
  LoadSome(static_cast<const Bits<kIn>*>(x) + at, count, words);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

static __device__ __noinline__ void StoreUnaligned(uint8_t* to, int64_t count, uint4 codes) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  StoreRun(to, count, 1, words);
}

// Loads a chunk of which the first `count` elements exist, and zeros after them. In aligned rows a
// chunk exists as a whole or not at all.
template <DType kIn>
__device__ __forceinline__ void LoadChunk(const QuantizeArguments& q, int64_t at, int64_t count,
                                          uint32_t (&to)[kWords]) {
  uint4 part = {};
  if (count > 0) {
    part = q.x_aligned ? *reinterpret_cast<const uint4*>(static_cast<const Bits<kIn>*>(q.x) + at)
                       : LoadUnaligned<kIn>(q.x, at, count);
  }
  to[0] = part.x, to[1] = part.y, to[2] = part.z, to[3] = part.w;
}

// The elementwise maximum of magnitudes of two words, ignoring NaN. Codes of FP8 are in the order
// of their magnitudes, with NaN above all.
template <DType kIn>
__device__ __forceinline__ uint32_t MaxMagnitude(uint32_t largest, uint32_t x) {
  uint32_t result = 0;
  if constexpr (kIn == DType::kF32) {
    result = BitsOf(fmaxf(FloatFromBits(largest), fabsf(FloatFromBits(x))));
  } else if constexpr (IsFloat8(kIn)) {
    result = __vmaxu4(largest, x & 0x7f7f7f7fu);
  } else if constexpr (kIn == DType::kBF16) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(x & 0x7fff7fffu));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(x & 0x7fff7fffu));
  }
  return result;
}

template <DType kIn>
__device__ __forceinline__ uint32_t MaxMagnitudes(const uint32_t (&words)[kWords],
                                                  uint32_t largest) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) largest = MaxMagnitude<kIn>(largest, words[i]);
  return largest;
}

// The magnitudes of a word, with 0 for infinities and NaN.
template <DType kIn>
__device__ __forceinline__ uint32_t FiniteMagnitudes(uint32_t word) {
  if constexpr (kIn == DType::kF32) {
    const uint32_t bits = word & 0x7fffffffu;
    return bits < kInfinityBits ? bits : 0;
  } else {
    constexpr uint32_t kInfinity = kIn == DType::kBF16 ? 0x7f80u : 0x7c00u;
    const uint32_t low = word & 0x7fffu, high = word >> 16 & 0x7fffu;
    return (low < kInfinity ? low : 0) | (high < kInfinity ? high << 16 : 0);
  }
}

// The largest element of a word of magnitudes, as the bits of a float32. Of FP8, NaN is one.
template <DType kIn>
__device__ __forceinline__ uint32_t MaxBits(uint32_t word) {
  if constexpr (IsFloat8(kIn)) {
    const uint32_t pair = __vmaxu4(word, word >> 16);
    const uint32_t largest = max(pair & 0xffu, pair >> 8 & 0xffu);
    return BitsOf(Decode<kIn>(static_cast<uint8_t>(largest))) & 0x7fffffffu;
  } else {
    float values[2] = {};
    DecodeWord<kIn>(word, values);
    return BitsOf(fmaxf(values[0], values[1]));
  }
}

// The largest finite magnitude of a chunk, as bits. Infinities are rare, so a chunk is read again
// here only if its maximum is one.
template <DType kIn>
__device__ __noinline__ uint32_t MaxFiniteBits(const void* x, int64_t at, int64_t count) {
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

// Raises an amax in global memory to the maximum of this block.
__device__ __forceinline__ void UpdateAmax(uint32_t* amax, uint32_t found_amax) {
  if (threadIdx.x == 0 && found_amax > 0) atomicMax(amax, found_amax);
}

// The largest finite magnitude of a chunk that was loaded from `at`.
template <DType kIn>
__device__ __forceinline__ uint32_t MaxOfChunk(const QuantizeArguments& q, int64_t at,
                                               int64_t count, const uint32_t (&words)[kWords]) {
  const uint32_t largest = MaxBits<kIn>(MaxMagnitudes<kIn>(words, 0));
  return largest < kInfinityBits ? largest : MaxFiniteBits<kIn>(q.x, at, count);
}

// Encodes what `divide` makes of each value and its place in the chunk.
template <DType kIn, DType kOut, typename Divide>
__device__ __forceinline__ void DivideEach(const uint32_t (&x)[kWords], Divide divide,
                                           uint32_t (&codes)[kValues<kIn> / 4]) {
  float values[kValues<kIn>];
#pragma unroll
  for (int i = 0; i < kWords; ++i) DecodeWord<kIn>(x[i], values + i * kPerWord<kIn>);
#pragma unroll
  for (int i = 0; i < kValues<kIn>; ++i) values[i] = divide(values[i], i);
#pragma unroll
  for (int i = 0; i < kValues<kIn> / 4; ++i) codes[i] = EncodeWord<kOut>(values + 4 * i);
}

template <DType kIn, DType kOut, typename Divide>
__device__ __forceinline__ void DivideChunk(const uint32_t (&x)[kWords], Divide divide,
                                            uint32_t (&codes)[kValues<kIn> / 4]) {
  DivideEach<kIn, kOut>(x, [=](float value, int) { return divide(value); }, codes);
}

template <DType kIn, DType kOut>
__device__ __forceinline__ void ToCodes(const uint32_t (&x)[kWords], FloatDivisor divisor,
                                        uint32_t (&codes)[kValues<kIn> / 4]) {
  DivideChunk<kIn, kOut>(x, [=](float value) { return Quotient(value, divisor); }, codes);
}

// Stores the first `count` of up to 16 codes. In aligned rows a chunk exists as a whole.
template <int kCodeWords>
__device__ __forceinline__ void StoreCodes(uint8_t* to, int64_t count, bool aligned,
                                           const uint32_t (&codes)[kCodeWords]) {
  if (!aligned) {
    uint32_t all[4] = {};
#pragma unroll
    for (int i = 0; i < kCodeWords; ++i) all[i] = codes[i];
    StoreUnaligned(to, min(count, int64_t{4 * kCodeWords}),
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
