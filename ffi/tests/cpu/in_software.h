// AVX-512 and AMX in software: what kernels use of them, on a machine that has AVX2.
//
// Included before a kernel file by the compiler's option. Functions with the names of the
// intrinsics stand in the namespace around the kernels, where they are found before the
// intrinsics themselves: the kernels are compiled as they are. software_test.cc compares each with
// the instruction where the machine has it.

#pragma once

#include <immintrin.h>

// What the kernels ask for AVX-512.
#ifndef __AVX512F__
#define __AVX512F__ 1
#endif

#include "tests/cpu/software/dots.h"
#include "tests/cpu/software/floats.h"
#include "tests/cpu/software/integers.h"
#include "tests/cpu/software/memory.h"
#include "tests/cpu/software/tiles.h"
