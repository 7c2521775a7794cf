// The loops of quantizing for x86 with AVX2.

#define JAXFP8_ISA avx2

#include "cpu/kernels/quantize/quantize_loops.h"
