// Compares each function of in_software.h with the instruction that it stands for, bit by bit, on
// machines that have the instruction.

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <random>
#include <string>

#include "tests/cpu/in_software.h"

namespace {

int failures = 0;

template <typename T>
void Same(const char* name, const T& soft, const T& real) {
  if (std::memcmp(&soft, &real, sizeof soft) == 0 || ++failures > 20) return;
  std::printf("FAILED: %s in software differs from the instruction\n", name);
}

// Bits of any kind; now and then those of a small, a subnormal or a special float.
struct Draw {
  std::mt19937 random{5};

  template <typename Vector>
  Vector Any() {
    uint32_t word[sizeof(Vector) / 4];
    constexpr uint32_t kFloats[] = {0x3f80c000u, 0x00000001u, 0x80000001u, 0x807fffffu, 0x7f800000u,
                                    0x7fa00000u, 0xbf8001ffu, 0x00800000u, 0x0080ff80u};
    for (uint32_t& bits : word) bits = random() % 3 ? random() : kFloats[random() % 9];
    Vector vector;
    std::memcpy(&vector, word, sizeof vector);
    return vector;
  }

  // Floats, or what float32 does not hold, of all magnitudes; often the same twice running.
  __m512d Doubles() {
    __m512d doubles;
    for (int i = 0; i < 8; ++i) {
      const auto value = double{Any<float>()};
      doubles[i] = random() % 3 ? value : value * (1 + 0x1p-30 * (random() % 64)) * 0x1p-3;
    }
    return doubles;
  }
};

#define CORE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define SAME(function, ...) Same(#function, jaxfp8::function(__VA_ARGS__), ::function(__VA_ARGS__))

CORE void CompareCore(Draw& draw) {
  const auto a = draw.Any<__m512i>(), b = draw.Any<__m512i>();
  const auto half = draw.Any<__m256i>();
  const auto quarter = draw.Any<__m128i>();
  const uint64_t mask = static_cast<uint64_t>(draw.random()) << 32 | draw.random();
  const auto byte = static_cast<char>(draw.random());
  SAME(_mm512_setzero_si512);
  SAME(_mm512_set1_epi32, static_cast<int>(mask));
  SAME(_mm512_set1_epi8, byte);
  SAME(_mm512_setr_epi32, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, -16);
  SAME(_mm512_broadcast_i32x4, quarter);
  SAME(_mm512_extracti32x4_epi32, a, 3);
  SAME(_mm512_castsi512_si128, a);
  SAME(_mm512_castsi512_ps, a);
  SAME(_mm512_loadu_si512, &a);
  SAME(_mm512_maskz_loadu_epi8, mask, &a);
  SAME(_mm512_cvtph_ps, half);
  SAME(_mm512_cvtepu16_epi32, half);
  SAME(_mm512_cvtepi32_epi8, a);
  SAME(_mm512_cvtepi8_epi16, half);
  SAME(_mm512_cvtepu8_epi16, half);
  SAME(_mm512_cvtepi8_epi32, quarter);
  SAME(_mm512_cvtepu8_epi32, quarter);
  SAME(_mm512_cvtepi32_ps, a);
  SAME(_mm512_cvtepi32_pd, half);
  SAME(_mm512_cvtps_pd, (__m256)half);
  const auto doubles = draw.Doubles(), others = draw.Doubles();
  SAME(_mm512_cvtpd_ps, doubles);
  SAME(_mm512_cvt_roundpd_ps, doubles, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  SAME(_mm512_cmp_pd_mask, doubles, others, _CMP_NEQ_UQ);
  SAME(_mm512_inserti64x4, a, half, 1);
  // Which NaN comes out is the compiler's choice.
  const auto below_2 = _mm512_set1_epi32(static_cast<int>(0xbfffffff));
  const auto x = (__m512)_mm512_and_si512(a, below_2), y = (__m512)_mm512_and_si512(b, below_2);
  SAME(_mm512_fmadd_ps, x, y, x);
  SAME(_mm512_mask_or_epi32, a, static_cast<__mmask16>(mask), a, b);
  SAME(_mm512_and_si512, a, b);
  SAME(_mm512_or_si512, a, b);
  SAME(_mm512_slli_epi32, a, 16);
  SAME(_mm512_srli_epi32, a, 16);
  SAME(_mm512_srli_epi16, a, 3);
  SAME(_mm512_add_epi8, a, b);
  SAME(_mm512_maskz_add_epi8, mask, a, b);
  SAME(_mm512_maskz_mov_epi8, mask, a);
  SAME(_mm512_abs_epi8, a);
  SAME(_mm512_cmpge_epu8_mask, a, b);
  SAME(_mm512_testn_epi8_mask, a, b);
  SAME(_mm512_shuffle_epi8, a, b);
  SAME(_mm512_mask_shuffle_epi8, a, mask, b, a);
  SAME(_mm512_permutexvar_epi32, a, b);
  SAME(_mm512_madd_epi16, a, b);
  SAME(_mm512_unpacklo_epi8, a, b);
  SAME(_mm512_unpackhi_epi8, a, b);
  SAME(_mm512_unpacklo_epi16, a, b);
  SAME(_mm512_unpackhi_epi16, a, b);
  SAME(_mm512_reduce_add_epi32, a);
  __m512i soft = a, real = a;
  jaxfp8::_mm512_mask_storeu_epi8(&soft, mask, b);
  ::_mm512_mask_storeu_epi8(&real, mask, b);
  Same("_mm512_mask_storeu_epi8", soft, real);
  jaxfp8::_mm512_storeu_si512(&soft, b);
  ::_mm512_storeu_si512(&real, b);
  Same("_mm512_storeu_si512", soft, real);
}

__attribute__((target("avx512f,avx512vnni"))) void CompareVnni(Draw& draw) {
  const auto a = draw.Any<__m512i>(), b = draw.Any<__m512i>(), c = draw.Any<__m512i>();
  SAME(_mm512_dpbusd_epi32, a, b, c);
}

__attribute__((target("avx512f,avx512bf16"))) void CompareBF16(Draw& draw) {
  const auto x = draw.Any<__m512>(), y = draw.Any<__m512>();
  const auto a = draw.Any<__m512bh>(), b = draw.Any<__m512bh>();
  SAME(_mm512_cvtne2ps_pbh, x, y);
  // Which NaN comes of several is not what a kernel depends on.
  const auto soft = jaxfp8::_mm512_dpbf16_ps(x, a, b), real = ::_mm512_dpbf16_ps(x, a, b);
  for (int i = 0; i < 16; ++i) {
    if (soft[i] == soft[i] || real[i] == real[i]) Same("_mm512_dpbf16_ps", soft[i], real[i]);
  }
}

__attribute__((target("avx512f,avx512vbmi"))) void CompareVbmi(Draw& draw) {
  const auto a = draw.Any<__m512i>(), b = draw.Any<__m512i>(), c = draw.Any<__m512i>();
  SAME(_mm512_permutex2var_epi8, a, b, c);
  SAME(_mm512_permutexvar_epi8, a, b);
}

// A tile each of rows and columns, and two of the same sums: for the software and the instruction.
struct TileCase {
  uint8_t sums[2][16][64], rows[16][64], columns[16][64];
};

TileCase DrawTiles(Draw& draw) {
  TileCase of;
  for (int row = 0; row < 16; ++row) {
    for (auto* tile : {of.sums[0], of.rows, of.columns}) {
      const auto line = draw.Any<__m512i>();
      std::memcpy(tile[row], &line, sizeof line);
    }
  }
  std::memcpy(of.sums[1], of.sums[0], sizeof of.sums[0]);
  return of;
}

constexpr uint8_t kTiles[64] = {1,  0,  0,  0, 0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                64, 0,  64, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                0,  0,  0,  0, 0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                16, 16, 16, 0, 0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};

// In assembly: in_software.h has taken the names of the intrinsics.
#define IN_TILES(instruction, of)                                                     \
  asm volatile(                                                                       \
      "ldtilecfg %0\n\t"                                                              \
      "tileloadd (%1,%4,1), %%tmm0\n\t"                                               \
      "tileloadd (%2,%4,1), %%tmm1\n\t"                                               \
      "tileloadd (%3,%4,1), %%tmm2\n\t" instruction                                   \
      " %%tmm2, %%tmm1, %%tmm0\n\t"                                                   \
      "tilestored %%tmm0, (%1,%4,1)\n\t"                                              \
      "tilerelease"                                                                   \
      :                                                                               \
      : "m"(kTiles), "r"(of.sums[1]), "r"(of.rows), "r"(of.columns), "r"(int64_t{64}) \
      : "memory")

template <typename Dot>
void InSoftware(TileCase& of, Dot dot) {
  jaxfp8::_tile_loadconfig(kTiles);
  _tile_loadd(0, of.sums[0], 64);
  _tile_loadd(1, of.rows, 64);
  _tile_loadd(2, of.columns, 64);
  dot();
  _tile_stored(0, of.sums[0], 64);
  jaxfp8::_tile_release();
}

void CompareTiles(Draw& draw) {
  TileCase bytes = DrawTiles(draw);
  InSoftware(bytes, [] { _tile_dpbssd(0, 1, 2); });
  IN_TILES("tdpbssd", bytes);
  Same("_tile_dpbssd", bytes.sums[0], bytes.sums[1]);
  TileCase floats = DrawTiles(draw);
  InSoftware(floats, [] { _tile_dpbf16ps(0, 1, 2); });
  IN_TILES("tdpbf16ps", floats);
  float soft[256], real[256];
  std::memcpy(soft, floats.sums[0], sizeof soft);
  std::memcpy(real, floats.sums[1], sizeof real);
  for (int i = 0; i < 256; ++i) {
    if (soft[i] == soft[i] || real[i] == real[i]) Same("_tile_dpbf16ps", soft[i], real[i]);
  }
}

bool HasTiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct Group {
  const char* name;
  bool here;
  void (*compare)(Draw&);
};

}  // namespace

int main() {
  __builtin_cpu_init();
  const bool core = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const Group groups[] = {
      {"avx512", core, CompareCore},
      {"avx512_vnni", core && __builtin_cpu_supports("avx512vnni"), CompareVnni},
      {"avx512_vbmi", core && __builtin_cpu_supports("avx512vbmi"), CompareVbmi},
      {"amx", HasTiles(), CompareTiles},
      {"avx512_bf16", core && __builtin_cpu_supports("avx512bf16"), CompareBF16},
  };
  Draw draw;
  for (const Group& group : groups) {
    for (int i = 0; group.here && i < 2000; ++i) group.compare(draw);
    std::printf("  %-12s %s\n", group.name,
                group.here ? "in software as in hardware"
                           : "not compared: this CPU lacks the instructions");
  }
  std::printf("  %d failures\n", failures);
  return failures != 0;
}
