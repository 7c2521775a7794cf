#include "cuda/kernels/general/general.h"

namespace jaxfp8::cuda {

Status GeneralWhyNot(const Problem& problem, const Device& device) {
  if (device.compute_capability < 80) {
    return "general needs a GPU of compute capability 8.0 or later";
  }
  const int64_t tiles = ((problem.rows + kGeneralTile - 1) / kGeneralTile) * problem.batch;
  const int64_t across = (problem.columns + kGeneralTile - 1) / kGeneralTile;
  if (across != 0 && tiles > (int64_t{1} << 31) / across) {
    return "general makes at most 2^31 tiles of 64 x 64 outputs";
  }
  return {};
}

}  // namespace jaxfp8::cuda
