// Checks the GPU kernels against host references, then times them beside a device copy.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -arch=sm_90a -I ffi \
//     ffi/bench/kernels_bench.cu ffi/cuda/kernels/{epilogue/epilogue,general/general}.cu \
//     ffi/cuda/kernels/{pack/pack.cu,quantize/quantize.cu,quantize/plan.cc} \
//     ffi/cuda/kernels/sm80_imma/{*.cu,schedule.cc} ffi/cuda/problem.cc -o kernels_bench
//   ./kernels_bench [check|time|epilogue|imma]
//
// Exits non-zero if a check fails. Times are given as bytes read and written per second, relative
// to a device-to-device copy of 512 MiB.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/product_case.h"
#include "common/activation.h"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/general/general.h"
#include "cuda/kernels/pack/pack.h"
#include "cuda/kernels/quantize/quantize.h"
#include "cuda/kernels/quantize/quotient.cuh"
#include "cuda/kernels/sm80_imma/path.h"
#include "cuda/kernels/sm80_imma/schedule.h"

namespace jaxfp8::cuda {
std::string CudaError(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return "";
  return std::string(what) + " failed: " + cudaGetErrorString(status);
}
}  // namespace jaxfp8::cuda

namespace {

using namespace jaxfp8;
using namespace jaxfp8::cuda;

#include "bench/kernels_checks.inc"
#include "bench/kernels_times.inc"
#include "bench/product_imma.inc"

}  // namespace

int main(int count, char** arguments) {
  const std::string only = count > 1 ? arguments[1] : "";
  const bool all = only != "epilogue" && only != "imma";
  if (only != "time" && only != "epilogue") {
    if (all) CheckQuantize();
    if (all) CheckPack();
    if (all) CheckGeneral();
    if (all) CheckEpilogue();
    CheckImma();
    std::printf("checks: %d, failures: %d\n", checks, failures);
  }
  if (only != "check") {
    TimeCopy();
    if (all) TimePacks();
    if (only != "imma") TimeEpilogues();
    if (all) TimeOthers();
    if (only != "epilogue") TimeImma();
  }
  return failures ? 1 : 0;
}
