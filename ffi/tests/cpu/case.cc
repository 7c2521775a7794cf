#include "tests/cpu/case.h"

#include <algorithm>

namespace jaxfp8::tests {
namespace {

bool Contains(const Shape& axes, int64_t axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

std::string TextOf(const Shape& shape) {
  std::string text = "[";
  for (int64_t size : shape) text += (text.size() > 1 ? "," : "") + std::to_string(size);
  return text + "]";
}

std::string TextOf(const SideCase& side) {
  return std::string(NameOf(side.dtype)) + TextOf(side.shape) + " contracting " +
         TextOf(side.contracting) + (side.batch.empty() ? "" : " batch " + TextOf(side.batch)) +
         " tiles " + TextOf(side.tiles) +
         (side.scale ? " scaled by " + std::string(NameOf(side.scale_type)) : "") +
         (side.scale_rounded ? " rounded" : "") +
         (side.zero_point ? " with zero points of " + std::string(NameOf(side.zero_type)) : "");
}

}  // namespace

Shape SideCase::ScaleShape() const {
  Shape sizes;
  for (size_t i = 0; i < shape.size(); ++i) {
    sizes.push_back((shape[i] + tiles[i] - 1) / tiles[i]);
  }
  return sizes;
}

Shape SideCase::Free() const {
  Shape axes;
  for (int64_t axis = 0; axis < static_cast<int64_t>(shape.size()); ++axis) {
    if (!Contains(contracting, axis) && !Contains(batch, axis)) axes.push_back(axis);
  }
  return axes;
}

Shape Case::OutShape() const {
  Shape out;
  for (size_t i = 0; i < lhs.batch.size(); ++i) {
    const int64_t left = lhs.shape[lhs.batch[i]], right = rhs.shape[rhs.batch[i]];
    out.push_back(left == 1 ? right : left);
  }
  for (const SideCase* side : {&lhs, &rhs}) {
    for (int64_t axis : side->Free()) out.push_back(side->shape[axis]);
  }
  return out;
}

std::string Case::Text() const {
  std::string text = TextOf(lhs) + " x " + TextOf(rhs) + " -> " + std::string(NameOf(out_dtype));
  if (activation != "none") text += ", " + activation;
  if (residual) {
    text += ", residual " + std::string(NameOf(residual_dtype)) + TextOf(*residual);
  }
  if (bias) text += ", bias " + std::string(NameOf(bias_dtype)) + TextOf(*bias);
  if (out_scale) text += ", out_scale " + TextOf(*out_scale);
  if (amax) text += ", amax " + TextOf(*amax);
  return text;
}

}  // namespace jaxfp8::tests
