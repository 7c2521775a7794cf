// The axes of a scaled dot in four groups (batch, rows, columns, K), and the strides of each
// operand along them. The cost depends on the number of axes, not on their sizes.

#pragma once

#include <cstdint>
#include <vector>

#include "common/spec.h"

namespace jaxfp8 {

// One axis of the dot, and its place in the shape of each array: -1 if the array lacks it.
struct Axis {
  int64_t size;
  int lhs;
  int rhs;
  int out;
};

// If one operand is broadcast along a batch axis, the axis counts as a free axis of the other.
struct AxisGroups {
  std::vector<Axis> batch, rows, columns, depth;
};

int64_t Size(const std::vector<Axis>& group);

// The contribution of one axis of one array to an offset: stride * (index / tile).
struct Digit {
  int64_t size;
  int64_t stride;
  int64_t tile;
};

// The number of segments with equal offsets along a group of axes, outermost first.
int64_t CountSegments(const std::vector<Digit>& digits);

// The shape of an array, and the dot's axis for each of its axes.
class AxisArray {
 public:
  // An array with one element per tile; with single values if `tiles` is empty.
  AxisArray(Dims shape, Dims tiles, int Axis::* place);

  // The strides along a group. Axes are merged if one stride serves both, and broadcast axes are
  // dropped.
  std::vector<Digit> Digits(const std::vector<Axis>& group) const;

  int64_t Count() const;

 private:
  struct Place {
    int64_t size, tile, stride;
  };

  int Axis::* place_;
  std::vector<Place> axes_;
};

// The strides of the values of one operand, and of its scales and zero points (one per tile).
struct OperandAxes {
  std::vector<Digit> batch, free, depth;
  std::vector<Digit> tile_batch, tile_free, tile_depth;
  int64_t tiles = 0;
};

struct Axes {
  AxisGroups groups;
  OperandAxes lhs, rhs;
};

Axes AxesOf(const ScaledDotSpec& spec);

}  // namespace jaxfp8
