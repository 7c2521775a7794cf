// Shapes and strides that follow from a spec.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/spec.h"

namespace jaxfp8 {

inline bool Contains(Dims axes, int64_t axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

// How many tiles an axis has. Correct for any tile size, up to the largest int64.
inline int64_t TileCount(int64_t size, int64_t tile) { return size / tile + (size % tile != 0); }

inline std::vector<int64_t> TileCounts(const OperandSpec& side) {
  std::vector<int64_t> counts;
  for (size_t i = 0; i < side.shape.size(); ++i) {
    counts.push_back(TileCount(side.shape[i], side.tiles[i]));
  }
  return counts;
}

// The shape of the sums of a side: that of its values, 1 along what is summed over.
inline std::vector<int64_t> SumsShape(const OperandSpec& side) {
  std::vector<int64_t> shape(side.shape.begin(), side.shape.end());
  for (int64_t axis : side.contracting) shape[axis] = 1;
  return shape;
}

// Strides of a dense row-major array, in elements.
inline std::vector<int64_t> Strides(Dims shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

// The axes that are neither contracted nor batch axes.
inline std::vector<int> FreeAxes(const OperandSpec& side) {
  std::vector<int> free;
  for (int axis = 0; axis < static_cast<int>(side.shape.size()); ++axis) {
    if (!Contains(side.contracting, axis) && !Contains(side.batch, axis)) free.push_back(axis);
  }
  return free;
}

inline std::vector<int64_t> OutShape(const ScaledDotSpec& spec) {
  std::vector<int64_t> out;
  for (size_t i = 0; i < spec.lhs.batch.size(); ++i) {
    const int64_t left = spec.lhs.shape[spec.lhs.batch[i]];
    out.push_back(left == 1 ? spec.rhs.shape[spec.rhs.batch[i]] : left);
  }
  for (const OperandSpec* side : {&spec.lhs, &spec.rhs}) {
    for (int axis : FreeAxes(*side)) out.push_back(side->shape[axis]);
  }
  return out;
}

}  // namespace jaxfp8
