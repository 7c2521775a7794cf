// What is packed next, asked for while packed columns are multiplied: packing alone would wait for
// memory, and memory for the products.

#ifndef JAXFP8_CPU_UPCOMING_H_
#define JAXFP8_CPU_UPCOMING_H_

#include <cstdint>

#include "cpu/kernels/kernel.h"
#include "cpu/plan.h"
#include "cpu/problem.h"

namespace jaxfp8 {

// The cache lines of a block of columns, in the order of memory, in even parts.
class Upcoming {
 public:
  // Of nothing.
  Upcoming() = default;

  Upcoming(const Side& side, const Block& block, int64_t parts) {
    if (block.count <= 0) return;
    if (side.prepared) {
      from_ = PreparedAt(side, block.batch, block.first, block.start);
      pitch_ = side.free[kPreparedColumns];
      runs_ = Blocks(block.count, kPreparedColumns);
      bytes_ = block.depth * kPreparedColumns;
    } else {
      const bool along = side.depth.Contiguous();
      const Offsets& across = along ? side.free : side.depth;
      if (across.table || !(along || side.free.Contiguous())) return;
      const int64_t size = SizeOf(side.dtype);
      from_ = side.values +
              size * (side.batch[block.batch] + side.free[block.first] + side.depth[block.start]);
      pitch_ = across.stride * size;
      runs_ = along ? block.count : block.depth;
      bytes_ = (along ? block.depth : block.count) * size;
    }
    part_ = Blocks(runs_ * Blocks(bytes_, kLine), parts);
  }

  // Asks for the next part, in L2.
  void Request() {
    for (int64_t i = 0; i < part_ && runs_ > 0; ++i) {
      __builtin_prefetch(from_ + at_, 0, 2);
      at_ += kLine;
      if (at_ < bytes_) continue;
      at_ = 0;
      from_ += pitch_;
      --runs_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  const uint8_t* from_ = nullptr;
  int64_t runs_ = 0, bytes_ = 0, pitch_ = 0;  // runs of so many bytes, and from one to the next
  int64_t at_ = 0;                            // of the first run
  int64_t part_ = 0;                          // in lines
};

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_UPCOMING_H_
