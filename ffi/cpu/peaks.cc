// The peak rates of the processor, for benchmarks: loops of a single arithmetic instruction, and of
// reads. No kernel can be faster than the loop of its instruction.

#include <cstdint>
#include <cstring>

#include "cpu/features.h"
#include "cpu/kernels/amx/tile_config.h"
#include "cpu/kernels/kernel.h"
#include "include/jaxfp8_cpu.h"

#ifdef JAXFP8_X86
#include <immintrin.h>
#endif

namespace jaxfp8 {
namespace {

// Independent accumulators: more than latency times ports of any processor until now, and few
// enough for its registers.
constexpr int kSums = 12;

// Vectors of 4 lanes. The compiler maps them to the baseline instructions of the architecture.
int64_t PortableF32(int64_t rounds) {
  typedef float F32 __attribute__((vector_size(16)));
  static volatile float source = 0.25f;  // each read may differ, so accumulators are not merged
  const F32 x = F32{} + source;
  F32 sums[kSums];
  for (F32& sum : sums) sum = F32{} + source;
  for (int64_t round = 0; round < rounds; ++round) {
    for (F32& sum : sums) sum = x * x + sum;
  }
  asm volatile("" : : "m"(sums) : "memory");
  return rounds * kSums * 4 * 2;
}

#ifdef JAXFP8_X86

// In assembly: compilers would move the accumulators about, or see their equality.

//   constraint  of a register
//   products    of a lane-wise instruction
#define JAXFP8_PEAK(Name, isa, Vector, constraint, instruction, products)              \
  __attribute__((target(isa))) int64_t Name(int64_t rounds) {                          \
    const Vector x = {};                                                               \
    Vector sums[kSums] = {};                                                           \
    for (int64_t round = 0; round < rounds; ++round) {                                 \
      for (Vector& sum : sums)                                                         \
        asm volatile(instruction " %1, %1, %0" : "+" constraint(sum) : constraint(x)); \
    }                                                                                  \
    return rounds * kSums * products * 2;                                              \
  }
JAXFP8_PEAK(Avx2F32, "avx2,fma", __m256, "x", "vfmadd231ps", 8)
JAXFP8_PEAK(Avx512F32, "avx512f", __m512, "v", "vfmadd231ps", 16)
JAXFP8_PEAK(Avx512Bf16, "avx512f", __m512, "v", "vdpbf16ps", 32)
JAXFP8_PEAK(Avx512Int8, "avx512f", __m512i, "v", "vpdpbusd", 64)
#undef JAXFP8_PEAK

// AMX: tiles of 16 x 64 bytes, and four accumulators as in the kernels.
#define JAXFP8_WITH_TILES __attribute__((target("amx-tile,amx-int8,amx-bf16")))

// Configures the tiles. This also sets them to zero.
JAXFP8_WITH_TILES void EnterTiles() {
  static constexpr TileConfig kConfig;
  _tile_loadconfig(&kConfig);
}

//   products  of a row of one tile and a column of another
#define JAXFP8_TILE_PEAK(Name, instruction, products)  \
  JAXFP8_WITH_TILES int64_t Name(int64_t rounds) {     \
    EnterTiles();                                      \
    for (int64_t round = 0; round < rounds; ++round) { \
      instruction(0, 4, 5);                            \
      instruction(1, 4, 5);                            \
      instruction(2, 4, 5);                            \
      instruction(3, 4, 5);                            \
    }                                                  \
    _tile_release();                                   \
    return rounds * 4 * (16 * 16 * products) * 2;      \
  }
JAXFP8_TILE_PEAK(AmxBf16, _tile_dpbf16ps, 32)
JAXFP8_TILE_PEAK(AmxInt8, _tile_dpbusd, 64)
#undef JAXFP8_TILE_PEAK

#endif

using Loop = int64_t (*)(int64_t rounds);

struct Entry {
  const char* kind;
  unsigned needs;  // bits of `Feature`
  Loop loop;
};

// The first row of a kind with a loop for this processor is used. "avx2" is the peak of AVX2
// kernels on any processor.
constexpr Entry kLoops[] = {
#ifdef JAXFP8_X86
    {"int8", kAmx, AmxInt8},           {"bf16", kAmx, AmxBf16},
    {"int8", kAvx512Vnni, Avx512Int8}, {"bf16", kAvx512Bf16, Avx512Bf16},
    {"f32", kAvx512, Avx512F32},       {"f32", kAvx2, Avx2F32},
    {"avx2", kAvx2, Avx2F32},
#endif
    {"f32", 0, PortableF32},
};

}  // namespace
}  // namespace jaxfp8

#pragma GCC visibility push(default)

extern "C" int64_t jaxfp8_cpu_peak_products(const char* kind, int64_t rounds) {
  const unsigned features = jaxfp8::CpuFeatures();
  for (const jaxfp8::Entry& entry : jaxfp8::kLoops) {
    const bool runs = (entry.needs & ~features) == 0;
    if (runs && std::strcmp(entry.kind, kind) == 0) return entry.loop(rounds);
  }
  return 0;
}

extern "C" uint64_t jaxfp8_cpu_peak_read(const void* data, size_t size) {
  typedef uint64_t Words __attribute__((vector_size(16)));
  constexpr size_t kStep = 256;    // bytes
  constexpr size_t kAhead = 2048;  // bytes; hardware prefetchers stop at the end of a page
  const char* from = static_cast<const char*>(data);
  Words sums[4] = {};
  for (size_t i = 0; i + kStep <= size; i += kStep) {
    for (size_t line = 0; line < kStep; line += 64) __builtin_prefetch(from + i + kAhead + line);
    for (size_t at = 0; at < kStep; at += sizeof(Words)) {
      Words words;
      std::memcpy(&words, from + i + at, sizeof words);
      sums[at / sizeof(Words) % 4] ^= words;
    }
  }
  const Words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  return all[0] ^ all[1];
}

#pragma GCC visibility pop
