// The schedule of `sm80_imma`: CTAs cover the columns and K, their weights fit shared memory, and
// what the path cannot compute is refused with a reason.

#include <string>

#include "cuda/kernels/sm80_imma/schedule.h"
#include "tests/expect.h"

namespace jaxfp8::cuda::imma {
namespace {

using tests::Expect;

Problem Product(int64_t rows, int64_t columns, int64_t depth) {
  Problem p;
  p.rows = rows, p.columns = columns, p.depth = depth;
  p.lhs.dtype = DType::kBF16, p.rhs.dtype = DType::kE4M3;
  p.lhs.free_stride = p.rhs.free_stride = depth, p.lhs.depth_stride = p.rhs.depth_stride = 1;
  p.out = {DType::kBF16, 0, columns, 1};
  return p;
}

Device Of(int compute_capability) {
  Device device;
  device.compute_capability = compute_capability;
  device.multiprocessors = compute_capability == 90 ? 132 : 108;
  device.shared_bytes = compute_capability == 90 ? 227 << 10 : 163 << 10;
  return device;
}

void CheckCovers(const Problem& p, const Device& device) {
  const SplitGrid s = MakeSchedule(p, device);
  const std::string name = std::to_string(p.rows) + "x" + std::to_string(p.columns) + "x" +
                           std::to_string(p.depth) + " on " +
                           std::to_string(device.compute_capability) + ": ";
  Expect(WhyNot(p, device).ok(), name + "it is taken");
  Expect(s.split * s.depth >= p.depth && s.depth % kBlockDepth == 0, name + "CTAs cover K");
  Expect(s.column_tiles * 16 * ColumnTiles(s.row_tiles) >= p.columns, name + "and the columns");
  Expect(8 * s.row_tiles >= p.rows, name + "and the rows");
  Expect(s.split == 1 || device.compute_capability >= 90, name + "clusters are of Hopper");
  Expect(static_cast<size_t>(SharedBytes(s.row_tiles, s.depth)) <= device.shared_bytes,
         name + "weights fit shared memory");
}

void CheckSchedules() {
  for (const int64_t rows : {1, 8, 9, 17, 32}) {
    for (const int64_t depth : {0, 1, 64, 100, 4096}) {
      for (const int64_t columns : {0, 1, 33, 4096}) {
        for (const int device : {80, 90}) CheckCovers(Product(rows, columns, depth), Of(device));
      }
    }
    CheckCovers(Product(rows, 4096, 28672), Of(90));
  }
  Expect(MakeSchedule(Product(1, 4096, 4096), Of(90)).split == 1, "the columns fill the device");
  Expect(MakeSchedule(Product(1, 1024, 4096), Of(90)).split == 4, "K is split where they do not");
  Expect(WeightPitch(4096) == 4096 + 64 && WeightPitch(64) == 64, "an odd number of 64 bytes");
}

void CheckRefused(const Problem& p, const Device& device, const std::string& reason) {
  const std::string why_not = WhyNot(p, device).message();
  Expect(why_not.find(reason) != std::string::npos, "`" + why_not + "` says: " + reason);
}

void CheckRefusals() {
  Problem p = Product(33, 128, 128);
  CheckRefused(p, Of(90), "up to 32 rows, and these are 33");
  CheckRefused(Product(1, 128, 128), Of(75), "compute capability 8.0");
  CheckRefused(Product(1, 128, 1 << 20), Of(90), "an int32 holds the sum");
  CheckRefused(Product(1, 128, 16384), Of(80), "columns have to fit shared memory");
  p = Product(1, 128, 128), p.lhs.zero_point = true;
  CheckRefused(p, Of(90), "no zero points");
  p = Product(1, 128, 128), p.rhs.scale = true, p.rhs.tiles.depth_stride = 1;
  CheckRefused(p, Of(90), "constant along the contracted axis");
  p = Product(1, 128, 128), p.lhs.dtype = DType::kE4M3;
  CheckRefused(p, Of(90), "int8, bfloat16 or float16 by FP8");
  p = Product(1, 128, 128), p.out.dtype = DType::kS32;
  CheckRefused(p, Of(90), "an int32 output");
  Expect(WhyNot(Swapped(Product(32, 128, 128)), Of(90)).ok(), "weights may be on the left");
}

void CheckScratch() {
  const CodesScratch s = ScratchOf(Product(5, 130, 100));
  Expect(s.pitch == 112 && s.scales == 768 && s.bytes == 768 + 4 * 5, "codes, then scales");
}

}  // namespace
}  // namespace jaxfp8::cuda::imma

int main() {
  using namespace jaxfp8::cuda::imma;
  CheckSchedules();
  CheckRefusals();
  CheckScratch();
  return jaxfp8::tests::Report("imma schedule");
}
