// AVX-512 and AMX in software: what kernels use of them, on a machine that has AVX2.
//
// Included before a kernel file by the compiler's option. Functions with the names of the
// intrinsics stand in the namespace around the kernels, where they are found before the
// intrinsics themselves: the kernels are compiled as they are. software_test.cc compares each with
// the instruction where the machine has it.
//
// Masked loads and stores touch the bytes of their mask only, one by one, so that AddressSanitizer
// sees each of them.

#ifndef JAXFP8_TESTS_CPU_IN_SOFTWARE_H_
#define JAXFP8_TESTS_CPU_IN_SOFTWARE_H_

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// What the kernels ask for AVX-512.
#ifndef __AVX512F__
#define __AVX512F__ 1
#endif

#define JAXFP8_SOFT [[maybe_unused]] static inline

namespace jaxfp8 {
namespace software {

typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t S32x16 __attribute__((vector_size(64)));
typedef int32_t S32x8 __attribute__((vector_size(32)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef uint8_t U8x64 __attribute__((vector_size(64)));
typedef int8_t S8x16 __attribute__((vector_size(16)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef uint16_t U16x32 __attribute__((vector_size(64)));
typedef int16_t S16x32 __attribute__((vector_size(64)));
typedef int8_t S8x32 __attribute__((vector_size(32)));
typedef uint8_t U8x32 __attribute__((vector_size(32)));

template <typename To, typename From>
[[gnu::always_inline]] inline To As(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// An operation of AVX2 on both halves.
template <typename Operation>
inline __m512i Halves(__m512i a, __m512i b, Operation operation) {
  __m256i left[2], right[2];
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  for (int i = 0; i < 2; ++i) left[i] = operation(left[i], right[i]);
  std::memcpy(&a, left, sizeof a);
  return a;
}

// Subnormal values become 0 of their sign.
[[gnu::always_inline]] inline F32x16 Flush(F32x16 value) {
  const U32x16 bits = As<U32x16>(value);
  const U32x16 subnormal = (U32x16)((bits & 0x7f800000u) == 0u);
  return As<F32x16>(bits & ~(subnormal & 0x7fffffffu));
}

// One product per lane added to `sum` with one rounding.
[[gnu::always_inline]] inline F32x16 Fused(F32x16 sum, F32x16 left, F32x16 right) {
  struct Halves {
    __m256 of[2];
  };
  auto next = As<Halves>(sum);
  const auto a = As<Halves>(left), b = As<Halves>(right);
  for (int i = 0; i < 2; ++i) next.of[i] = _mm256_fmadd_ps(a.of[i], b.of[i], next.of[i]);
  return As<F32x16>(next);
}

// The same where subnormals count as 0, and become it.
inline F32x16 FlushedProduct(F32x16 sum, U32x16 a, U32x16 b) {
  return Flush(Fused(Flush(sum), Flush(As<F32x16>(a)), Flush(As<F32x16>(b))));
}

}  // namespace software

JAXFP8_SOFT __m512i _mm512_setzero_si512() { return __m512i{}; }
JAXFP8_SOFT __m512i _mm512_set1_epi32(int value) {
  return (__m512i)(software::S32x16{} + int32_t{value});
}
JAXFP8_SOFT __m512i _mm512_set1_epi8(char value) {
  return (__m512i)(software::U8x64{} + static_cast<uint8_t>(value));
}
JAXFP8_SOFT __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }

JAXFP8_SOFT __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i,
                                      int j, int k, int l, int m, int n, int o, int p) {
  return (__m512i)software::S32x16{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
JAXFP8_SOFT __m512i _mm512_broadcast_i32x4(__m128i a) {
  const __m128i parts[4] = {a, a, a, a};
  return software::As<__m512i>(parts);
}
JAXFP8_SOFT __m128i _mm512_extracti32x4_epi32(__m512i a, int part) {
  __m128i parts[4];
  std::memcpy(parts, &a, sizeof parts);
  return parts[part];
}
JAXFP8_SOFT __m128i _mm512_castsi512_si128(__m512i a) { return _mm512_extracti32x4_epi32(a, 0); }

JAXFP8_SOFT __m512i _mm512_loadu_si512(const void* from) {
  __m512i value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
JAXFP8_SOFT void _mm512_storeu_si512(void* to, __m512i value) {
  std::memcpy(to, &value, sizeof value);
}
JAXFP8_SOFT __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* from) {
  uint8_t value[64] = {};
  for (int i = 0; i < 64; ++i) {
    if (mask >> i & 1) value[i] = static_cast<const uint8_t*>(from)[i];
  }
  return _mm512_loadu_si512(value);
}
JAXFP8_SOFT void _mm512_mask_storeu_epi8(void* to, __mmask64 mask, __m512i from) {
  uint8_t value[64];
  _mm512_storeu_si512(value, from);
  for (int i = 0; i < 64; ++i) {
    if (mask >> i & 1) static_cast<uint8_t*>(to)[i] = value[i];
  }
}

JAXFP8_SOFT __m512 _mm512_cvtph_ps(__m256i codes) {
  __m128i half[2];
  std::memcpy(half, &codes, sizeof half);
  const __m256 value[2] = {_mm256_cvtph_ps(half[0]), _mm256_cvtph_ps(half[1])};
  __m512 both;
  std::memcpy(&both, value, sizeof both);
  return both;
}
JAXFP8_SOFT __m512i _mm512_cvtepu16_epi32(__m256i codes) {
  return (__m512i) __builtin_convertvector((software::U16x16)codes, software::S32x16);
}
JAXFP8_SOFT __m128i _mm512_cvtepi32_epi8(__m512i wide) {
  return (__m128i) __builtin_convertvector((software::S32x16)wide, software::S8x16);
}
JAXFP8_SOFT __m512i _mm512_cvtepi8_epi16(__m256i codes) {
  return (__m512i) __builtin_convertvector((software::S8x32)codes, software::S16x32);
}
JAXFP8_SOFT __m512i _mm512_cvtepu8_epi16(__m256i codes) {
  return (__m512i) __builtin_convertvector((software::U8x32)codes, software::S16x32);
}
JAXFP8_SOFT __m512i _mm512_cvtepi8_epi32(__m128i codes) {
  return (__m512i) __builtin_convertvector((software::S8x16)codes, software::S32x16);
}
JAXFP8_SOFT __m512i _mm512_cvtepu8_epi32(__m128i codes) {
  return (__m512i) __builtin_convertvector((software::U8x16)codes, software::S32x16);
}
JAXFP8_SOFT __m512 _mm512_cvtepi32_ps(__m512i values) {
  return __builtin_convertvector((software::S32x16)values, __m512);
}

JAXFP8_SOFT __m512d _mm512_cvtepi32_pd(__m256i values) {
  return __builtin_convertvector((software::S32x8)values, __m512d);
}
JAXFP8_SOFT __m512d _mm512_cvtps_pd(__m256 values) {
  return __builtin_convertvector(values, __m512d);
}

JAXFP8_SOFT __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  __m256 left[2], right[2], added[2];
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  std::memcpy(added, &c, sizeof added);
  for (int i = 0; i < 2; ++i) added[i] = _mm256_fmadd_ps(left[i], right[i], added[i]);
  return software::As<__m512>(added);
}

JAXFP8_SOFT __m256 _mm512_cvtpd_ps(__m512d values) {
  return __builtin_convertvector(values, __m256);
}

// Rounds towards 0, whatever is asked for.
JAXFP8_SOFT __m256 _mm512_cvt_roundpd_ps(__m512d values, int) {
  __m256 to;
  for (int i = 0; i < 8; ++i) {
    const auto nearest = static_cast<float>(values[i]);
    const auto bits = software::As<uint32_t>(nearest);
    const bool away = std::fabs(double{nearest}) > std::fabs(values[i]);
    to[i] = software::As<float>(bits - (away ? 1 : 0));
  }
  return to;
}

// Whether they differ, whatever is asked for; NaN does.
JAXFP8_SOFT __mmask8 _mm512_cmp_pd_mask(__m512d a, __m512d b, int) {
  __mmask8 differ = 0;
  for (int i = 0; i < 8; ++i) differ |= static_cast<__mmask8>(!(a[i] == b[i])) << i;
  return differ;
}

JAXFP8_SOFT __m512i _mm512_castsi256_si512(__m256i a) {
  __m512i to = {};
  std::memcpy(&to, &a, sizeof a);
  return to;
}
// Into the upper half.
JAXFP8_SOFT __m512i _mm512_inserti64x4(__m512i a, __m256i b, int) {
  std::memcpy(reinterpret_cast<char*>(&a) + sizeof b, &b, sizeof b);
  return a;
}
JAXFP8_SOFT __m512i _mm512_mask_or_epi32(__m512i from, __mmask16 mask, __m512i a, __m512i b) {
  auto to = (software::U32x16)from;
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) to[i] = ((software::U32x16)a)[i] | ((software::U32x16)b)[i];
  }
  return (__m512i)to;
}

JAXFP8_SOFT __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
JAXFP8_SOFT __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
JAXFP8_SOFT __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
  return (__m512i)((software::U32x16)a << count);
}
JAXFP8_SOFT __m512i _mm512_srli_epi32(__m512i a, unsigned count) {
  return (__m512i)((software::U32x16)a >> count);
}
JAXFP8_SOFT __m512i _mm512_srli_epi16(__m512i a, unsigned count) {
  return (__m512i)((software::U16x32)a >> static_cast<uint16_t>(count));
}
JAXFP8_SOFT __m512i _mm512_add_epi8(__m512i a, __m512i b) {
  return (__m512i)((software::U8x64)a + (software::U8x64)b);
}
JAXFP8_SOFT __m512i _mm512_maskz_add_epi8(__mmask64 mask, __m512i a, __m512i b) {
  const __m512i sum = _mm512_add_epi8(a, b);
  return _mm512_maskz_loadu_epi8(mask, &sum);
}
JAXFP8_SOFT __m512i _mm512_maskz_mov_epi8(__mmask64 mask, __m512i a) {
  return _mm512_maskz_loadu_epi8(mask, &a);
}
JAXFP8_SOFT __m512i _mm512_abs_epi8(__m512i a) {
  const auto sign = (software::U8x64)((__v64qi)a < 0);
  return (__m512i)(((software::U8x64)a ^ sign) - sign);
}
JAXFP8_SOFT __mmask64 _mm512_cmpge_epu8_mask(__m512i a, __m512i b) {
  const auto left = (software::U8x64)a, right = (software::U8x64)b;
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= uint64_t{left[i] >= right[i]} << i;
  return mask;
}
JAXFP8_SOFT __mmask64 _mm512_testn_epi8_mask(__m512i a, __m512i b) {
  return _mm512_cmpge_epu8_mask(__m512i{}, a & b);
}

JAXFP8_SOFT __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_madd_epi16(x, y); });
}
JAXFP8_SOFT __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_unpacklo_epi8(x, y); });
}
JAXFP8_SOFT __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_unpackhi_epi8(x, y); });
}
JAXFP8_SOFT __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_unpacklo_epi16(x, y); });
}
JAXFP8_SOFT __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_unpackhi_epi16(x, y); });
}
JAXFP8_SOFT __m512i _mm512_shuffle_epi8(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_shuffle_epi8(x, y); });
}
JAXFP8_SOFT __m512i _mm512_mask_shuffle_epi8(__m512i from, __mmask64 mask, __m512i a, __m512i b) {
  _mm512_mask_storeu_epi8(&from, mask, _mm512_shuffle_epi8(a, b));
  return from;
}
JAXFP8_SOFT __m512i _mm512_permutex2var_epi8(__m512i a, __m512i places, __m512i b) {
  uint8_t entries[128], place[64];
  std::memcpy(entries, &a, sizeof a);
  std::memcpy(entries + 64, &b, sizeof b);
  std::memcpy(place, &places, sizeof place);
  for (uint8_t& byte : place) byte = entries[byte & 127];
  return _mm512_loadu_si512(place);
}
JAXFP8_SOFT __m512i _mm512_permutexvar_epi8(__m512i places, __m512i a) {
  return _mm512_permutex2var_epi8(a, _mm512_and_si512(places, _mm512_set1_epi8(63)), a);
}
JAXFP8_SOFT __m512i _mm512_permutexvar_epi32(__m512i places, __m512i a) {
  return (__m512i)__builtin_shuffle((software::S32x16)a, (software::S32x16)places);
}
JAXFP8_SOFT int _mm512_reduce_add_epi32(__m512i a) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += ((software::U32x16)a)[i];
  return static_cast<int>(sum);
}

// Four unsigned bytes times four signed ones per lane, added without saturation.
JAXFP8_SOFT __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  auto total = (software::U32x16)sum;
  for (int i = 0; i < 4; ++i) {
    const auto left = (software::S32x16)((software::U32x16)a >> (8 * i) & 0xffu);
    const auto right = (software::S32x16)((software::U32x16)b << (24 - 8 * i)) >> 24;
    total += (software::U32x16)(left * right);
  }
  return (__m512i)total;
}

// Two products of bfloat16 per lane, the odd one first, each added with one rounding.
JAXFP8_SOFT __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const auto left = software::As<software::U32x16>(a), right = software::As<software::U32x16>(b);
  const auto odd = software::FlushedProduct(sum, left & 0xffff0000u, right & 0xffff0000u);
  return software::FlushedProduct(odd, left << 16, right << 16);
}

// The lower half of the result comes from `b`; rounds to nearest even, subnormals become 0.
JAXFP8_SOFT __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
  uint16_t codes[32];
  for (int i = 0; i < 32; ++i) {
    const float value = i < 16 ? b[i] : a[i - 16];
    const auto bits = software::As<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t code = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    if (magnitude < 0x00800000u) code = bits >> 16 & 0x8000u;
    if (magnitude > 0x7f800000u) code = bits >> 16 | 0x40u;
    codes[i] = static_cast<uint16_t>(code);
  }
  return software::As<__m512bh>(codes);
}

// Tiles: the state of a thread.
namespace software {

struct Tiles {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config;
  uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

inline void LoadTile(int tile, const void* from, int64_t stride) {
  std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
  for (int row = 0; row < tiles.config.rows[tile]; ++row) {
    const auto* line = static_cast<const uint8_t*>(from) + row * stride;
    std::memcpy(tiles.data[tile][row], line, tiles.config.row_bytes[tile]);
  }
}

inline void StoreTile(int tile, void* to, int64_t stride) {
  for (int row = 0; row < tiles.config.rows[tile]; ++row) {
    auto* line = static_cast<uint8_t*>(to) + row * stride;
    std::memcpy(line, tiles.data[tile][row], tiles.config.row_bytes[tile]);
  }
}

inline void ZeroTile(int tile) { std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]); }

template <typename Vector>
inline Vector RowOf(int tile, int row) {
  Vector vector;
  std::memcpy(&vector, tiles.data[tile][row], sizeof vector);
  return vector;
}

inline int32_t GroupOf(int tile, int row, int group) {
  int32_t bits;
  std::memcpy(&bits, tiles.data[tile][row] + 4 * group, sizeof bits);
  return bits;
}

// Four products of signed bytes per lane.
inline U32x16 SignedDot(U32x16 a, U32x16 b) {
  U32x16 total{};
  for (int j = 0; j < 4; ++j) {
    total += (U32x16)(((S32x16)(a << (24 - 8 * j)) >> 24) * ((S32x16)(b << (24 - 8 * j)) >> 24));
  }
  return total;
}

// The instruction faults on tiles of other sizes.
inline void CheckSizes(int sums, int rows, int columns) {
  const auto& config = tiles.config;
  const bool fit = config.rows[sums] == config.rows[rows] &&
                   config.row_bytes[sums] == config.row_bytes[columns] &&
                   config.row_bytes[rows] == 4 * config.rows[columns];
  if (!fit) std::abort();
}

// sums[i] += rows[i][g] * columns[g], for the groups g of 32 bits of a row.
inline void DotBytes(int sums, int rows, int columns) {
  CheckSizes(sums, rows, columns);
  for (int i = 0; i < tiles.config.rows[sums]; ++i) {
    auto sum = RowOf<U32x16>(sums, i);
    for (int g = 0; g < tiles.config.row_bytes[rows] / 4; ++g) {
      const U32x16 row = U32x16{} + static_cast<uint32_t>(GroupOf(rows, i, g));
      sum += SignedDot(row, RowOf<U32x16>(columns, g));
    }
    std::memcpy(tiles.data[sums][i], &sum, sizeof sum);
  }
}

// Even and odd values are summed apart, then together, and then added.
inline void DotBF16(int sums, int rows, int columns) {
  CheckSizes(sums, rows, columns);
  const int groups = tiles.config.row_bytes[rows] / 4;
  F32x16 even_of[16], odd_of[16];
  for (int g = 0; g < groups; ++g) {
    const auto column = RowOf<U32x16>(columns, g);
    even_of[g] = Flush(As<F32x16>(column << 16));
    odd_of[g] = Flush(As<F32x16>(column & 0xffff0000u));
  }
  for (int i = 0; i < tiles.config.rows[sums]; ++i) {
    F32x16 even{}, odd{};
    for (int g = 0; g < groups; ++g) {
      const U32x16 row = U32x16{} + static_cast<uint32_t>(GroupOf(rows, i, g));
      even = Flush(Fused(even, Flush(As<F32x16>(row << 16)), even_of[g]));
      odd = Flush(Fused(odd, Flush(As<F32x16>(row & 0xffff0000u)), odd_of[g]));
    }
    const F32x16 sum = Flush(Flush(RowOf<F32x16>(sums, i)) + Flush(even + odd));
    std::memcpy(tiles.data[sums][i], &sum, sizeof sum);
  }
}

}  // namespace software

JAXFP8_SOFT void _tile_loadconfig(const void* config) {
  std::memcpy(&software::tiles.config, config, sizeof software::tiles.config);
}
JAXFP8_SOFT void _tile_release() { software::tiles = {}; }

}  // namespace jaxfp8

// Macros where the compiler has them.
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadd(tile, from, stride) jaxfp8::software::LoadTile(tile, from, stride)
#define _tile_stored(tile, to, stride) jaxfp8::software::StoreTile(tile, to, stride)
#define _tile_zero(tile) jaxfp8::software::ZeroTile(tile)
#define _tile_dpbssd(sums, rows, columns) jaxfp8::software::DotBytes(sums, rows, columns)
#define _tile_dpbf16ps(sums, rows, columns) jaxfp8::software::DotBF16(sums, rows, columns)

#undef JAXFP8_SOFT

#endif  // JAXFP8_TESTS_CPU_IN_SOFTWARE_H_
