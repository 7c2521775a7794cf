// The paths by cuBLASLt; each is a row of the table in cuda/route.cc.

#ifndef JAXFP8_CUDA_CUBLASLT_PATHS_H_
#define JAXFP8_CUDA_CUBLASLT_PATHS_H_

#include "cuda/path.h"

namespace jaxfp8::cuda {

// FP8 by FP8 on FP8 tensor cores.
extern const Path kCublasLtFp8;
// Integers of 8 bits on INT8 tensor cores, summed exactly.
extern const Path kCublasLtInt8;
// Everything that 16 bits hold exactly: 8-bit sides are decoded piece by piece, and multiplied on
// 16-bit tensor cores while they are still in L2.
extern const Path kCublasLtWide;

// Whether one of them takes the operands' types, on some device.
bool LibraryMayTake(const Problem& problem);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_CUBLASLT_PATHS_H_
