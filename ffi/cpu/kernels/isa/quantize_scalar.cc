// The portable loops of quantizing.

#define JAXFP8_ISA scalar

#include "cpu/kernels/quantize/quantize_loops.h"
