// From specs to canonical problems: strides of values, scales and planes, and what is refused.

#include <cstdio>
#include <string>
#include <vector>

#include "common/check.h"
#include "cuda/problem.h"
#include "tests/expect.h"

using namespace jaxfp8;

namespace {

using tests::Expect;

using Sizes = std::vector<int64_t>;

struct Given {
  Sizes lhs{3, 5, 32}, lhs_contracting{2}, lhs_batch{0}, lhs_tiles{1, 1, 32};
  Sizes rhs{3, 32, 7}, rhs_contracting{1}, rhs_batch{0}, rhs_tiles{3, 16, 4};
  Sizes residual{3, 1, 7}, bias{1, 1, 7}, amax{3, 5, 1};

  ScaledDotSpec Spec() const {
    ScaledDotSpec spec;
    spec.lhs = {"float8_e4m3fn", lhs, lhs_contracting, lhs_batch, lhs_tiles, true, false};
    spec.rhs = {"int8", rhs, rhs_contracting, rhs_batch, rhs_tiles, true, true};
    spec.epilogue = {true,   residual, "bfloat16", true, bias, "silu",
                     "int8", true,     bias,       true, amax};
    spec.precision = "highest";
    return spec;
  }
};

Status Make(const Given& given, cuda::Problem& problem) {
  const ScaledDotSpec spec = given.Spec();
  const Status status = CheckSpec(spec);
  Expect(status.ok(), "the spec is sound: " + status.message());
  return cuda::MakeProblem({spec, ""}, problem);
}

void CheckStrides() {
  cuda::Problem p;
  Expect(Make(Given{}, p).ok(), "three axes on each side are taken");
  Expect(p.batch == 3 && p.rows == 5 && p.columns == 7 && p.depth == 32, "sizes");
  Expect(p.lhs.batch_stride == 160 && p.lhs.free_stride == 32 && p.lhs.depth_stride == 1,
         "depth-contiguous side");
  Expect(p.rhs.batch_stride == 224 && p.rhs.free_stride == 1 && p.rhs.depth_stride == 7,
         "free-contiguous side");
  Expect(!p.lhs.IsMnMajor() && p.rhs.IsMnMajor(), "which is which");
  Expect(p.lhs.tiles.ConstantAlongDepth() && p.lhs.tiles.At(2, 4, 31) == 14, "scales by row");
  Expect(p.rhs.tiles.At(2, 6, 31) == 3 && p.rhs.tiles.At(0, 3, 15) == 0, "scales by tile");
  Expect(p.residual.At(2, 4, 6) == 20 && p.bias.At(2, 4, 6) == 6, "planes shared along axes");
  Expect(p.amax.At(2, 4, 6) == 14 && p.out.At(2, 4, 6) == 104, "amax by row, output in full");
  Expect(p.highest && p.activation == Activation::kSilu && p.out.dtype == DType::kS8, "the rest");
}

void CheckShared() {
  Given given;
  given.lhs[0] = 1, given.lhs_tiles[0] = 1;
  cuda::Problem p;
  Expect(Make(given, p).ok(), "a shared side is taken");
  Expect(p.batch == 3 && p.lhs.batch_stride == 0 && p.lhs.tiles.batch_stride == 0,
         "and does not move");
}

void CheckWithoutBatch() {
  Given given;
  given.lhs = {5, 32}, given.lhs_contracting = {1}, given.lhs_batch = {}, given.lhs_tiles = {5, 8};
  given.rhs = {7, 32}, given.rhs_contracting = {1}, given.rhs_batch = {}, given.rhs_tiles = {1, 32};
  given.residual = {5, 7}, given.bias = {1, 1}, given.amax = {1, 1};
  cuda::Problem p;
  Expect(Make(given, p).ok(), "two axes on each side are taken");
  Expect(p.batch == 1 && p.lhs.tiles.At(0, 4, 31) == 3 && p.rhs.tiles.At(0, 6, 31) == 6, "scales");
  Expect(p.residual.At(0, 4, 6) == 34 && p.amax.At(0, 4, 6) == 0, "planes");
}

// Rows [B, H, M, K] by a cache [B, T, H, K] with a scale for each token and head.
Given Cache() {
  Given given;
  given.lhs = {3, 2, 5, 32}, given.lhs_contracting = {3}, given.lhs_batch = {0, 1};
  given.lhs_tiles = {1, 1, 1, 32};
  given.rhs = {3, 7, 2, 32}, given.rhs_contracting = {3}, given.rhs_batch = {0, 2};
  given.rhs_tiles = {1, 1, 1, 32};
  given.residual = {3, 2, 5, 7}, given.bias = {1, 1, 1, 7}, given.amax = {3, 2, 1, 1};
  return given;
}

void CheckTwoBatchAxes() {
  cuda::Problem p;
  Expect(Make(Cache(), p).ok(), "two batch axes are taken");
  Expect(p.batch == 6 && p.inner_batch == 2 && p.rows == 5 && p.columns == 7, "as one batch");
  Expect(p.lhs.batch_stride == 160 && p.lhs.HasOneBatchStride(),
         "that side by side has one stride");
  const auto value = [&](int64_t b) { return b * p.rhs.batch_stride + b / 2 * p.rhs.batch_jump; };
  Expect(value(0) == 0 && value(1) == 32 && value(2) == 7 * 64 && value(5) == 14 * 64 + 32,
         "that with an axis between has a jump for each outer index");
  const cuda::Tiles& t = p.rhs.tiles;
  Expect(t.At(5, 6, 31) + 2 * t.batch_jump == (2 * 7 + 6) * 2 + 1, "its scales have one, too");
  Expect(p.rhs.free_stride == 64 && p.rhs.depth_stride == 1,
         "lines lie as far apart as all heads are long");
  Expect(p.residual.At(5, 4, 6) == 209 && p.amax.At(5, 4, 6) == 5 && p.bias.At(5, 4, 6) == 6,
         "planes have one stride or none");
}

void CheckOuterAxisInside() {
  Given given = Cache();
  given.lhs = {2, 3, 5, 32}, given.rhs_batch = {2, 0};
  given.residual = {2, 3, 5, 7}, given.amax = {2, 3, 1, 1};
  cuda::Problem p;
  Expect(Make(given, p).ok() && p.inner_batch == 3, "a batch [H, B] of [B, T, H, K] is taken");
  const cuda::Tiles& t = p.rhs.tiles;
  Expect(p.rhs.batch_stride == 7 * 64 && 3 * p.rhs.batch_stride + p.rhs.batch_jump == 32,
         "it jumps back");
  Expect(t.batch_stride == 14 && 3 * t.batch_stride + t.batch_jump == 1, "its scales do, too");
}

void CheckOneText() {
  Given given = Cache();
  given.lhs[0] = given.rhs[0] = given.residual[0] = given.amax[0] = 1;
  cuda::Problem p;
  Expect(Make(given, p).ok(), "an outer batch axis of 1 is taken");
  Expect(
      p.batch == 2 && p.inner_batch == 1 && p.rhs.batch_stride == 32 && p.rhs.HasOneBatchStride(),
      "and leaves one stride");
}

void CheckRefusedBatches() {
  Given given = Cache();
  given.lhs[0] = 1;
  cuda::Problem p;
  Expect(Make(given, p).message().find("`lhs` is shared along one of two") != std::string::npos,
         "a side that one batch axis shares is refused");
  given = Cache();
  given.bias = {3, 1, 1, 7};
  Expect(Make(given, p).message().find("`bias` is shared along one of two") != std::string::npos,
         "and so is a plane");
  given = Cache();
  given.rhs_tiles = {2, 1, 1, 32};
  Expect(Make(given, p).message().find("`rhs_tiles` is 2 along the batch") != std::string::npos,
         "and tiles across some of a batch axis");
}

void CheckRefused() {
  Given given;
  given.lhs = {5, 32, 3}, given.lhs_contracting = {1}, given.lhs_batch = {2};
  given.lhs_tiles = {1, 32, 1};
  cuda::Problem p;
  Expect(
      Make(given, p).message().find("the last axis of `lhs` is a batch axis") != std::string::npos,
      "a batch in the last axis is refused");
  given = Given{};
  given.rhs_tiles = {2, 16, 4};
  Expect(Make(given, p).message().find("`rhs_tiles` is 2 along the batch") != std::string::npos,
         "tiles across some of a batch are refused");
}

void CheckSwapped() {
  cuda::Problem p;
  Expect(Make(Given{}, p).ok(), "the problem is made");
  const cuda::Problem s = cuda::Swapped(p);
  Expect(s.rows == 7 && s.columns == 5 && s.lhs.dtype == DType::kS8, "sides change places");
  Expect(s.out.At(2, 6, 4) == p.out.At(2, 4, 6) && s.amax.At(2, 6, 4) == p.amax.At(2, 4, 6),
         "and planes are read the other way");
}

// Rows of two groups, whose epilogue varies from group to group by its bias alone.
void CheckGroups() {
  cuda::Problem p;
  p.batch = 2, p.rows = 6, p.columns = 8, p.depth = 16;
  p.grouping = cuda::Grouping::kMasked;
  p.lhs.dtype = DType::kBF16, p.rhs.dtype = DType::kE4M3;
  p.rhs.batch_stride = 8 * 16;
  p.out = {DType::kS8, 0, 8, 1}, p.residual = {DType::kBF16, 0, 8, 1};
  p.out_scale = {DType::kF32, 0, 1, 0}, p.bias = {DType::kF32, 8, 0, 1};
  p.amax.dtype = DType::kF32, p.activation = Activation::kSilu;
  Expect(cuda::WhyNotGroups(p).ok(), "an epilogue of groups is taken");
  const auto refused = [&](const char* why, auto change) {
    cuda::Problem other = p;
    change(other);
    Expect(cuda::WhyNotGroups(other).message().find(why) != std::string::npos, why);
  };
  refused("one row of bias", [](cuda::Problem& q) { q.bias.row_stride = 8; });
  refused("no batch stride", [](cuda::Problem& q) { q.residual.batch_stride = 24; });
  refused("no batch stride", [](cuda::Problem& q) { q.out_scale.batch_stride = 1; });
  refused("`amax` is one", [](cuda::Problem& q) { q.amax.batch_stride = 1; });
  refused("`amax` is one", [](cuda::Problem& q) { q.amax.row_stride = 1; });
  refused("as many rows each", [](cuda::Problem& q) { q.rows = 7; });
  refused("along the contracted axis have no epilogue",
          [](cuda::Problem& q) { q.grouping = cuda::Grouping::kContracted; });
}

}  // namespace

int main() {
  CheckStrides();
  CheckShared();
  CheckWithoutBatch();
  CheckTwoBatchAxes();
  CheckOuterAxisInside();
  CheckOneText();
  CheckRefusedBatches();
  CheckRefused();
  CheckSwapped();
  CheckGroups();
  return jaxfp8::tests::Report("cuda problem");
}
