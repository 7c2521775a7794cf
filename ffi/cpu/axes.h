// The axes of a scaled dot in four groups, and how the offset of an element counts along each.
//
// All of it follows from a spec in a few steps for each axis, however long they are.

#ifndef JAXFP8_CPU_AXES_H_
#define JAXFP8_CPU_AXES_H_

#include <cstdint>
#include <vector>

#include "common/spec.h"

namespace jaxfp8 {

// One axis of the dot, and where it is found in each array; -1 where it is not.
struct Axis {
  int64_t size;
  int lhs;
  int rhs;
  int out;
};

// A batch axis along which one side does not vary counts as free on the other.
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

// Along a group of axes, outermost first: how many runs of equal offsets there are. In a few steps
// for each axis.
int64_t CountSegments(const std::vector<Digit>& digits);

// An array and the place of each axis of the dot in it.
class Array {
 public:
  // Of tiles of this size; of values where it is empty.
  Array(Dims shape, Dims tiles, int Axis::* place);

  // Neighbours that count on like one digit are joined, and those that never move dropped.
  std::vector<Digit> Digits(const std::vector<Axis>& group) const;

  int64_t Count() const;

 private:
  struct Place {
    int64_t size, tile, stride;
  };

  int Axis::* place_;
  std::vector<Place> axes_;
};

// How the values of one side count, and its tiles where it has scales or zero points.
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
