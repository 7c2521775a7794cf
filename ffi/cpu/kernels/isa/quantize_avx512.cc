// The loops of quantizing for x86 with AVX-512.

#define JAXFP8_ISA avx512

#include "cpu/kernels/quantize/quantize_loops.h"
