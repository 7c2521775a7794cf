#include "cpu/features.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <string>

#include "cpu/kernels/kernel.h"

namespace jaxfp8 {
namespace {

struct FeatureName {
  unsigned bit;
  const char* name;
};

constexpr FeatureName kNames[] = {{kAvx2, "avx2"},
                                  {kAvx512, "avx512"},
                                  {kAvx512Vbmi, "avx512_vbmi"},
                                  {kAvx512Vnni, "avx512_vnni"},
                                  {kAvx512Bf16, "avx512_bf16"},
                                  {kAmx, "amx"}};

#ifdef JAXFP8_X86
// Tiles are 8 KB of state for each thread. Linux gives them only after one request.
bool AllowsTiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool HasTiles() {
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         __builtin_cpu_supports("amx-bf16") && AllowsTiles();
}
#endif

unsigned Detect() {
  unsigned found = 0;
#ifdef JAXFP8_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx2) found |= kAvx2;
  if (avx512) found |= kAvx512;
  if (avx512 && __builtin_cpu_supports("avx512vbmi")) found |= kAvx512Vbmi;
  if (avx512 && __builtin_cpu_supports("avx512vnni")) found |= kAvx512Vnni;
  if (avx512 && __builtin_cpu_supports("avx512bf16")) found |= kAvx512Bf16;
  if (avx512 && HasTiles()) found |= kAmx;
#endif
  return found;
}

std::string Join(unsigned features) {
  std::string names;
  for (const FeatureName& entry : kNames) {
    if (!(features & entry.bit)) continue;
    if (!names.empty()) names += ' ';
    names += entry.name;
  }
  return names;
}

}  // namespace

unsigned CpuFeatures() {
  static const unsigned features = Detect();
  return features;
}

const char* CpuFeatureNames() {
  static const std::string names = Join(CpuFeatures());
  return names.c_str();
}

}  // namespace jaxfp8
