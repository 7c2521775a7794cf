// The axes of a scaled dot in four groups (batch, rows, columns, K), and the strides of each
// operand along them. The cost depends on the number of axes, not on their sizes.

#ifndef JAXFP8_CPU_AXES_H_
#define JAXFP8_CPU_AXES_H_

#include <cstdint>
#include <vector>

#include "common/spec.h"

namespace jaxfp8 {

// One axis of the dot, and its place in the shape of each array: -1 where the array lacks it.
struct Axis {
  int64_t size;
  int lhs;
  int rhs;
  int out;
};

// A batch axis along which one operand is broadcast counts as a free axis of the other.
struct Groups {
  std::vector<Axis> batch, rows, columns, depth;
};

int64_t Size(const std::vector<Axis>& group);

// The contribution of one axis of one array to an offset: stride * (index / tile).
struct Digit {
  int64_t size;
  int64_t stride;
  int64_t tile;
};

// The number of runs of equal offsets along a group of axes, outermost first.
int64_t CountSegments(const std::vector<Digit>& digits);

// The shape of an array, and which axis of the dot each of its axes is.
class Array {
 public:
  // An array of one element per tile; of single values where `tiles` is empty.
  Array(Dims shape, Dims tiles, int Axis::* place);

  // The strides along a group, with axes merged where one stride serves both, and broadcast axes
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
struct SideAxes {
  std::vector<Digit> batch, free, depth;
  std::vector<Digit> tile_batch, tile_free, tile_depth;
  int64_t tiles = 0;
};

struct Axes {
  Groups groups;
  SideAxes lhs, rhs;
};

Axes AxesOf(const ScaledDotSpec& spec);

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_AXES_H_
