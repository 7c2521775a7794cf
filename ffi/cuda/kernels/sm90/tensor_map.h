// Tensor maps: how the tensor memory accelerator (TMA) finds an operand in memory.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/status.h"

namespace jaxfp8::cuda::sm90 {

// An operand in bytes: `batches` matrices of `lines` lines of `depth` bytes.
struct MappedOperand {
  const void* values = nullptr;  // 16-byte aligned, as are the pitches
  int64_t depth = 0, lines = 0, batches = 1;
  int64_t line_pitch = 0, batch_pitch = 0;
};

// Maps boxes of `box_bytes` (128 or 64) x `box_lines` lines, which arrive in shared memory swizzled
// by so many bytes.
// Needs no device memory and takes about a microsecond.
Status MapOperand(const MappedOperand& operand, int box_bytes, int box_lines, CUtensorMap& map);

// Maps boxes of 64 rows x 64 columns of an output of 16 bits, which lie in shared memory swizzled
// by 128 bytes. Pitches are in bytes.
Status MapOutput(void* out, int64_t rows, int64_t columns, int64_t batches, int64_t row_pitch,
                 int64_t batch_pitch, CUtensorMap& map);

}  // namespace jaxfp8::cuda::sm90
