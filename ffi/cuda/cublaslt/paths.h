// The cuBLASLt paths. Each is a row of the table in cuda/route.cc.

#pragma once

#include "cuda/path.h"

namespace jaxfp8::cuda {

// FP8 by FP8 on FP8 tensor cores.
extern const Path kCublasLtFp8;
// int8 and uint8 on INT8 tensor cores, accumulated exactly.
extern const Path kCublasLtInt8;
// Every problem with operands exact in 16 bits. 8-bit sides are decoded piece by piece and
// multiplied on 16-bit tensor cores.
extern const Path kCublasLtWide;

// Whether one of them takes the operands' types on some device.
bool LibraryMayTake(const Problem& problem);

}  // namespace jaxfp8::cuda
