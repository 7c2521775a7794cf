// Which path computes a problem on a device, and why the others cannot. Pure: needs no GPU.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/kernel_calls.h"
#include "common/status.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {

// All paths, those included that only a call that names them takes.
const std::vector<const Path*>& AllPaths();

using Calls = KernelCalls<Path, AllPaths>;

// Up to this many rows, `sm80_w8a16`, which reads 8-bit weights as they are stored, is faster than
// `cublaslt_wide`, which decodes them first. On an H200 with 14336 x 4096 e4m3 weights: 1.6x with
// 128 rows, equal with 256.
inline constexpr int64_t kSkinnyRows = 256;

// Whether the 16-bit side has at most kSkinnyRows lines; of FP8 by FP8 whether a side has at most
// `w8a16::kMaxFloat8Rows`. There, too, the other side is read as it is stored, and no sums are
// left in memory.
bool IsSkinny(const Problem& problem);

// With fewer rows than these `sm80_w8a16` is faster than `sm90_gemm`, whose tiles have 128: on an
// H100 64 rows of 14336 x 4096 take 33 us, not 39, and 96 rows 59, not 35.
inline constexpr int64_t kManyRows = 65;

// Up to kSkinnyRows rows it takes more outputs than these, too, since many blocks share a tile
// otherwise: 256 rows of 1024 x 4096 take 16 us by `sm80_w8a16`, and 21 by `sm90_gemm`.
inline constexpr double kFewOutputs = 1 << 18;

// It was timed from this depth on. With less, as the 128 of attention's keys, an epilogue follows
// every few steps.
inline constexpr int64_t kMinDepth = 1024;

// The same for groups, by the mean of their rows: on an H200 64 groups of 24 rows on average take
// 188 us by `sm80_w8a16` and 194 by `sm90_gemm`, with 1536 x 4096 weights, and those of 48 rows 245
// and 202. Depths below 2048 were not timed.
inline constexpr int64_t kManyGroupedRows = 33, kMinGroupedDepth = 256;

// Whether a product of 16-bit values and 8-bit weights has so many rows and outputs, and the depth.
bool FillsHopper(const Problem& problem);

// In place of a path's name: a product of FP8 that is computed in int8, as `compute="int8"` means
// it. One path computes it, `sm80_imma`; what that cannot take is two roundings and a product of
// int8.
inline constexpr std::string_view kInInt8 = "int8";

struct Choice {
  const Path* path;
  Status why_not;  // why it cannot compute the problem
};

// The paths that compute what the problem says, best first. The first that can compute it does.
//   name  kInInt8, or any other for a problem that is computed as it is stored
std::vector<Choice> Choices(const Problem& problem, const Device& device,
                            std::string_view name = "");

struct Route {
  const Path* path = nullptr;
  std::string reason;  // why there is no path
};

// The best path for the problem on the device, or the one called `name`, or for kInInt8.
Route RouteTo(const Problem& problem, const Device& device, std::string_view name);

// Bytes of workspace with which the path of the problem, or the one called `kernel`, is as fast as
// it can be on devices of a compute capability (10 * major + minor), or on any device (0). Plans
// also work with less.
size_t WorkspaceFor(const Problem& problem, std::string_view kernel, int compute_capability);

// The smallest device of a compute capability, for routes without a GPU.
Device SmallestDevice(int compute_capability, int cublaslt_version);

}  // namespace jaxfp8::cuda
