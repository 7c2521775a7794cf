// Which path computes a problem on a device, and why the others do not. Pure: no GPU is asked.

#ifndef JAXFP8_CUDA_ROUTE_H_
#define JAXFP8_CUDA_ROUTE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/path.h"

namespace jaxfp8::cuda {

// Every path there is.
const std::vector<const Path*>& AllPaths();

// Up to so many rows the weights are what takes time: they are read once, as they are. Beyond it
// decoding them for the library's 16-bit product pays. On an H200 with e4m3 weights, `sm80_w8a16`
// against `cublaslt_wide`, in us: of 14336 x 4096, 128 rows 61 and 97, 192 rows 93 and 122, 256
// rows 119 and 117; of 28672 x 8192, 128 rows 190 and 465, 256 rows 384 and 423.
inline constexpr int64_t kSkinnyRows = 256;

// Whether the side of 16 bits has no more lines than that.
bool IsSkinny(const Problem& problem);

struct Choice {
  const Path* path;
  std::string why_not;  // "" where it can compute the problem
};

// Every path, best first for this problem on this device: the first that can, does.
std::vector<Choice> Choices(const Problem& problem, const Device& device);

struct Route {
  const Path* path = nullptr;
  std::string reason;  // why there is none
};

// The best path for the problem on the device, or the one called `name`.
Route RouteTo(const Problem& problem, const Device& device, std::string_view name);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_ROUTE_H_
