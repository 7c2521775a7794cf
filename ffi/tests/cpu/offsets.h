// Where the elements of dense row-major arrays lie.

#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "tests/cpu/array.h"

namespace jaxfp8::tests {

inline Shape Strides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

inline Shape SizesOf(const Shape& shape, const Shape& axes) {
  Shape sizes;
  for (int64_t axis : axes) sizes.push_back(shape[axis]);
  return sizes;
}

inline Shape AllAxes(const Shape& shape) {
  Shape axes(shape.size());
  std::iota(axes.begin(), axes.end(), 0);
  return axes;
}

// The offset for each index over chosen axes of an array, the last fastest. `sizes` are those of
// the indices: an axis of size 1 is repeated.
inline std::vector<int64_t> Along(const Shape& shape, const Shape& axes, const Shape& sizes) {
  const Shape strides = Strides(shape);
  std::vector<int64_t> offsets = {0};
  for (size_t i = 0; i < axes.size(); ++i) {
    const int64_t stride = shape[axes[i]] == 1 ? 0 : strides[axes[i]];
    std::vector<int64_t> next;
    for (int64_t offset : offsets) {
      for (int64_t index = 0; index < sizes[i]; ++index) next.push_back(offset + index * stride);
    }
    offsets = std::move(next);
  }
  return offsets;
}

}  // namespace jaxfp8::tests
