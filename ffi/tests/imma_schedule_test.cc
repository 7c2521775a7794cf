// The schedule of `sm80_imma`: pieces cover the output once and fit the workspace, splits cover K,
// and what the path cannot compute is refused with a reason.

#include <string>
#include <vector>

#include "cuda/kernels/sm80_imma/layout.h"
#include "cuda/kernels/sm80_imma/schedule.h"
#include "tests/expect.h"

namespace jaxfp8::cuda::imma {
namespace {

using tests::Expect;

Problem Product(int64_t batch, int64_t rows, int64_t columns, int64_t depth) {
  Problem p;
  p.batch = batch, p.rows = rows, p.columns = columns, p.depth = depth;
  p.lhs.dtype = DType::kBF16, p.lhs.batch_stride = batch > 1 ? rows * depth : 0;
  p.rhs.dtype = DType::kE4M3;
  p.lhs.free_stride = p.rhs.free_stride = depth, p.lhs.depth_stride = p.rhs.depth_stride = 1;
  p.out = {DType::kBF16, batch > 1 ? rows * columns : 0, columns, 1};
  return p;
}

void CheckPieces(const Problem& p, size_t workspace) {
  const std::string name = std::to_string(p.batch) + "x" + std::to_string(p.rows) + "x" +
                           std::to_string(p.columns) + " in " + std::to_string(workspace) + ": ";
  Expect(WhyNotWorkspace(p, workspace).ok(), name + "enough workspace is accepted");
  std::vector<int> seen(p.batch * p.rows);
  const Status all = ForEachPiece(p, workspace, [&](const Piece& piece) {
    const auto sums = static_cast<size_t>(4 * piece.batches * piece.rows * PitchOf(p));
    Expect(piece.rows > 0 && piece.batches > 0, name + "no piece is empty");
    Expect(ScratchOf(p).sums + sums <= workspace, name + "a piece fits");
    Expect(piece.row % (16 * RowFragmentsFor(p)) == 0, name + "a piece begins with a tile");
    for (int64_t b = piece.batch; b < piece.batch + piece.batches; ++b) {
      for (int64_t r = piece.row; r < piece.row + piece.rows; ++r) ++seen[b * p.rows + r];
    }
    const Schedule s = MakeSchedule(p, piece, 108);
    Expect((s.splits - 1) * s.depth_tiles_per_split < std::max(s.depth_tiles, 1) &&
               s.splits * s.depth_tiles_per_split >= s.depth_tiles,
           name + "splits cover K, and none is idle");
    Expect(s.row_tiles * 16 * RowFragmentsFor(p) >= piece.rows &&
               s.column_tiles * kTileColumns >= p.columns,
           name + "tiles cover the piece");
    return std::string();
  });
  Expect(all.ok(), name + "no piece fails");
  for (int times : seen) Expect(times == 1, name + "each row is computed once");
}

void CheckAllPieces() {
  for (const int64_t rows : {1, 16, 17, 130, 1000}) {
    for (const int64_t batch : {1, 5}) {
      const Problem p = Product(batch, rows, 300, 4096);
      const size_t least =
          ScratchOf(p).sums + 4 * PitchOf(p) * std::min<size_t>(rows, 16 * RowFragmentsFor(p));
      for (const size_t workspace : {least, least + 100, 2 * least, BestWorkspace(p)}) {
        CheckPieces(p, workspace);
      }
      Expect(!WhyNotWorkspace(p, least - 1).ok(), "too little workspace is refused");
      Expect(LargestPiece(p, BestWorkspace(p)).batches == batch,
             "with the best there is one piece");
    }
  }
}

// What each line of both sides needs lies apart, aligned, before the sums.
void CheckScratchOf(const Problem& p) {
  const Scratch s = ScratchOf(p);
  const auto bytes = [&](const Side& side, int64_t lines) {
    const int64_t batch = side.batch_stride == 0 ? 1 : p.batch;
    return side.dtype == DType::kS8 ? 0 : static_cast<size_t>(4 * batch * lines);
  };
  const size_t left = bytes(p.lhs, p.rows), right = bytes(p.rhs, p.columns);
  const size_t starts[] = {s.lhs_steps, s.lhs_scales, s.rhs_steps, s.rhs_scales, s.sums};
  const size_t sizes[] = {left, left, right, right};
  const std::string name = std::string(NameOf(p.lhs.dtype)) + " " + std::to_string(p.batch) + "x" +
                           std::to_string(p.rows) + "x" + std::to_string(p.columns);
  for (int i = 0; i < 4; ++i) {
    Expect(starts[i] + sizes[i] <= starts[i + 1], "scratch does not overlap: " + name);
    Expect(starts[i + 1] - starts[i] < sizes[i] + 256, "scratch is not wasted: " + name);
    Expect(starts[i + 1] % 256 == 0, "scratch is aligned: " + name);
  }
}

void CheckScratch() {
  for (const int64_t rows : {1, 64, 65, 1000}) {
    for (const int64_t batch : {1, 5}) {
      for (const DType left : {DType::kS8, DType::kE4M3, DType::kBF16}) {
        Problem p = Product(batch, rows, 300, 64);
        p.lhs.dtype = left;
        CheckScratchOf(p);
        p.rhs.batch_stride = p.lhs.batch_stride == 0 ? 0 : 300 * 64;
        CheckScratchOf(p);
      }
    }
  }
}

void CheckSplits() {
  const Problem few = Product(1, 4, 512, 4096), many = Product(1, 4096, 4096, 4096);
  Expect(MakeSchedule(few, {0, 1, 0, 4}, 108).splits == 16, "few tiles are split along K");
  Expect(MakeSchedule(many, {0, 1, 0, 4096}, 108).splits == 1, "many are not");
}

void CheckRefusals() {
  Device old, ampere;
  old.compute_capability = 75, ampere.compute_capability = 80;
  const Problem good = Product(1, 4, 512, 4096);
  Expect(WhyNot(good, ampere).ok() && WhyNot(Swapped(good), ampere).ok(), "either side");
  const auto refused = [&](const Problem& p, const Device& device, const char* reason) {
    Expect(WhyNot(p, device).message().find(reason) != std::string::npos, reason);
  };
  Problem p = good;
  refused(p, old, "compute capability 8.0");
  p.rhs.dtype = DType::kS8;
  refused(p, ampere, "the operands are bfloat16 and int8");
  p = good, p.rhs.scale = true, p.rhs.tiles = {1, 128, 0, 32, 1};
  refused(p, ampere, "constant along the contracted axis");
  p = good, p.lhs.dtype = DType::kS8, p.lhs.zero_point = true;
  refused(p, ampere, "zero points");
  refused(Product(1, 4, 512, 1 << 17), ampere, "the sum of 131071");
  refused(Product(1 << 16, 1, 1, 1), ampere, "a batch up to 65535");
  p = good, p.out.dtype = DType::kS32;
  refused(p, ampere, "int32 output");
}

}  // namespace
}  // namespace jaxfp8::cuda::imma

int main() {
  using namespace jaxfp8::cuda::imma;
  CheckAllPieces();
  CheckScratch();
  CheckSplits();
  CheckRefusals();
  return jaxfp8::tests::Report("imma schedule");
}
