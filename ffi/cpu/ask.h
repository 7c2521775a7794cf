// Asks the caches for a block that is wanted soon, a part at a time.
//
// Its lines may lie in a page each, where the processor does not look ahead by itself. So what is
// packed next is asked for while what was packed before is multiplied.

#ifndef JAXFP8_CPU_ASK_H_
#define JAXFP8_CPU_ASK_H_

#include <algorithm>
#include <cstdint>

#include "cpu/kernels/kernel.h"
#include "cpu/problem.h"

namespace jaxfp8 {

class Ask {
 public:
  Ask() = default;
  Ask(const Side& side, const Block& block) : size_(SizeOf(side.dtype)) {
    from_ = side.values + side.batch[block.batch] * size_;
    const bool along = side.depth.Contiguous();
    across_ = along ? side.free : side.depth;
    first_ = along ? block.first : block.start;
    lines_ = along ? block.count : block.depth;
    from_ += (along ? side.depth[block.start] : side.free[block.first]) * size_;
    bytes_ = (along ? block.depth : block.count) * size_;
  }

  // Part `i` of `parts`.
  void Part(int64_t i, int64_t parts) const {
    for (int64_t line = lines_ * i / parts; line < lines_ * (i + 1) / parts; ++line) {
      const uint8_t* at = from_ + across_[first_ + line] * size_;
      for (int64_t offset = 0; offset < bytes_; offset += 64) __builtin_prefetch(at + offset, 0, 2);
    }
  }

 private:
  int size_ = 0;
  const uint8_t* from_ = nullptr;
  Offsets across_;
  int64_t first_ = 0, lines_ = 0, bytes_ = 0;
};

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_ASK_H_
