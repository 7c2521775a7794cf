// The portable loops of quantising.

#define JAXFP8_ISA scalar

#include "cpu/kernels/quantize/quantize_loops.h"
