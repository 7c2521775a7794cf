// The rounding of `sm80_imma`: every FP8 code beside every amax has the int8 code that a division
// in float32 gives, and `LargestCodes` finds the amax.

#include <algorithm>
#include <cmath>
#include <string>

#include "common/decode.h"
#include "cuda/kernels/sm80_imma/rounding.cuh"
#include "tests/expect.h"

namespace jaxfp8::cuda::imma {
namespace {

using tests::Expect;

// By division and in the order of jaxfp8/_call/reference/quantize_reference.py.
int CodeOf(float value, float step) {
  const float steps = value / step;
  if (std::isnan(steps)) return 0;
  return static_cast<int>(std::fmin(std::fmax(std::nearbyint(steps), -128.0f), 127.0f));
}

// The code in each byte of a word, whatever the codes beside it.
template <DType kType>
bool RoundsTo(uint32_t code, const Rounding& rounding, int want) {
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t others = 0x7f3c0180u & ~(0xffu << (8 * i));
    const uint32_t rounded = Round<kType>(others | code << (8 * i), rounding);
    if (static_cast<int8_t>(rounded >> (8 * i)) != want) return false;
  }
  return true;
}

template <DType kType>
void CheckRounding() {
  for (uint32_t top = 0; top < 128; ++top) {
    const float amax = Decode<kType>(static_cast<uint8_t>(top));
    if (!std::isfinite(amax)) continue;
    const float step = ScaleOf<DType::kS8>(amax);
    const Rounding rounding = RoundingOf<kType>(amax);
    int wrong = 0;
    for (uint32_t code = 0; code < 256; ++code) {
      const float value = Decode<kType>(static_cast<uint8_t>(code));
      if (std::isfinite(value) && std::fabs(value) > amax) continue;
      wrong += !RoundsTo<kType>(code, rounding, CodeOf(value, step));
    }
    Expect(wrong == 0, std::string(NameOf(kType)) + " beside an amax of " + std::to_string(amax) +
                           ": " + std::to_string(wrong) + " codes are wrong");
  }
}

template <DType kType>
void CheckLargest() {
  for (uint32_t code = 0; code < 256; ++code) {
    const bool finite = std::isfinite(Decode<kType>(static_cast<uint8_t>(code)));
    for (int i = 0; i < 32; i += 8) {
      const uint32_t largest = LargestCodes<kType>((0x81020203u & ~(0xffu << i)) | code << i, 0);
      const uint32_t found = std::max(largest & 0xffffu, largest >> 16);
      const uint32_t least = i == 0 ? 2 : 3;
      Expect(found == std::max(least, finite ? code & 0x7fu : 0), "the largest of four codes");
    }
  }
}

}  // namespace
}  // namespace jaxfp8::cuda::imma

int main() {
  using namespace jaxfp8::cuda::imma;
  CheckRounding<jaxfp8::DType::kE4M3>();
  CheckRounding<jaxfp8::DType::kE5M2>();
  CheckLargest<jaxfp8::DType::kE4M3>();
  CheckLargest<jaxfp8::DType::kE5M2>();
  return jaxfp8::tests::Report("imma rounding");
}
