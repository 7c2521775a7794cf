// The portable loops of quantising.

#define JAXFP8_ISA scalar

#include "cpu/kernels/quantize_run.h"
