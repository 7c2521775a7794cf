// The C interface of the CUDA library with invalid arguments, without a device and with a stand-in
// for one. Routes, workspace and plans read and write nothing out of bounds, sizes do not overflow,
// nothing takes long, and a refusal gives a reason.
//
//   fuzz [--specs COUNT] [--seed NUMBER]

#include "tests/fuzz.h"

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernels/quantize/quantize.h"
#include "include/jaxfp8/jaxfp8.h"
#include "tests/cublaslt_stand_ins.h"
#include "tests/cuda/runtime_stand_ins.h"
#include "tests/wild.h"
#include "tests/wild_data.h"

namespace jaxfp8::cuda {
namespace {

using tests::ExpectAnswer;
using tests::failures;
using tests::Message;
using tests::Wild;
using tests::WildData;
using tests::Wilder;
using tests::WildSide;

// No call asks for more workspace, whatever its sizes.
constexpr size_t kMaxWorkspace = size_t{300} << 20;

// Draws valid problems in the canonical form.
class Drawer {
 public:
  explicit Drawer(Wilder& wilder) : wilder_(wilder) {}

  Wild Draw() {
    Wild wild;
    const std::vector<int64_t> sizes = {1, 2, 3, 8, 16, 17, 32, 64, 100, 128, 130, 256};
    const int64_t batch = wilder_.Below(3) ? 1 : 1 + wilder_.Below(3);
    rows_ = wilder_.Pick(sizes), columns_ = wilder_.Pick(sizes), depth_ = wilder_.Pick(sizes);
    DrawSide(wild.lhs, wilder_.Below(4) ? batch : 1, rows_);
    DrawSide(wild.rhs, batch, columns_);
    if (!IsEightBit(ParseDType(wild.lhs.dtype)) && !IsEightBit(ParseDType(wild.rhs.dtype))) {
      wild.rhs.dtype = "float8_e4m3fn";
    }
    DrawEpilogue(wild, batch);
    if (wilder_.Below(4) == 0) PartBatch(wild);
    return wild;
  }

 private:
  // Makes the batch two axes, of which the inner one may stand behind the next axis of a side.
  void PartBatch(Wild& wild) {
    const int64_t inner = 1 + wilder_.Below(3);
    for (WildSide* side : {&wild.lhs, &wild.rhs}) {
      const int64_t at = 1 + wilder_.Below(2);
      side->shape.insert(side->shape.begin() + at, inner);
      side->tiles.insert(side->tiles.begin() + at, wilder_.Below(2) ? 1 : inner);
      side->batch.push_back(at);
      if (side->contracting[0] >= at) ++side->contracting[0];
    }
    for (std::vector<int64_t>* shape : {&wild.residual, &wild.bias, &wild.amax, &wild.out_scale}) {
      if (!shape->empty()) shape->insert(shape->begin() + 1, shape->front() == 1 ? 1 : inner);
    }
  }

  void DrawSide(WildSide& side, int64_t batch, int64_t lines) {
    side.dtype = wilder_.Pick<std::string>({"float8_e4m3fn", "float8_e4m3fn", "float8_e5m2", "int8",
                                            "uint8", "bfloat16", "bfloat16", "float16", "float32"});
    const bool turned = wilder_.Below(3) == 0;
    side.shape = {batch, lines, depth_};
    side.batch = {0}, side.contracting = {turned ? 1 : 2};
    side.tiles = {wilder_.Below(2) ? 1 : batch, Tile(lines), Tile(depth_)};
    if (turned) std::swap(side.shape[1], side.shape[2]), std::swap(side.tiles[1], side.tiles[2]);
    side.scale = wilder_.Below(3) > 0;
    side.scale_exponents = side.scale && wilder_.Below(3) == 0;
    side.zero_point = IsInt8(ParseDType(side.dtype)) && wilder_.Below(3) == 0;
    side.sums = IsInt8(ParseDType(side.dtype)) && wilder_.Below(3) == 0;
  }

  int64_t Tile(int64_t size) { return wilder_.Pick<int64_t>({1, 3, 32, 64, 128, size, size}); }

  void DrawEpilogue(Wild& wild, int64_t batch) {
    wild.out_dtype = wilder_.Pick<std::string>(
        {"float32", "bfloat16", "bfloat16", "float16", "int8", "uint8", "float8_e4m3fn"});
    const auto plane = [&](int32_t& has, std::vector<int64_t>& shape) {
      has = wilder_.Below(4) == 0;
      if (!has) return;
      shape = {batch, rows_, columns_};
      for (int64_t& size : shape) size = wilder_.Below(2) ? size : 1;
    };
    plane(wild.has_residual, wild.residual);
    if (wild.has_residual) wild.residual_dtype = wilder_.Pick<std::string>({"bfloat16", "float32"});
    plane(wild.has_bias, wild.bias);
    plane(wild.has_amax, wild.amax);
    if (IsEightBit(ParseDType(wild.out_dtype))) plane(wild.has_out_scale, wild.out_scale);
    wild.activation = wilder_.Pick<std::string>({"none", "none", "relu", "silu"});
  }

  Wilder& wilder_;
  int64_t rows_ = 0, columns_ = 0, depth_ = 0;
};

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : random_(seed), wilder_(random_), drawer_(wilder_) {}

  void RunSpec() {
    Wild wild = drawer_.Draw();
    for (int64_t changes = wilder_.Below(4); changes > 0; --changes) wilder_.Change(wild);
    if (wilder_.Below(8) == 0) {
      wild.kernel = wilder_.Pick<std::string>({"sm80_w8a16", "sm80_imma", "int8", "sm90_gemm",
                                               "decoded_w8a16", "cublaslt_wide", "general"});
    }
    const jaxfp8_scaled_dot_spec spec = wild.Spec();
    const std::string name = TextOf(wild);
    const bool accepted = AskForScratch(spec, name, wild);
    AskForRoute(spec, name, accepted);
    MakePlan(spec, name, accepted);
    if (accepted && WildData::IsSmall(wild)) Run(wild, spec, name);
  }

  void RunQuantize() {
    QuantizeProblem problem;
    problem.rows = wilder_.Size(), problem.columns = wilder_.Size();
    problem.tile_rows = wilder_.Pick<int64_t>({1, 128, wilder_.Size()});
    problem.tile_columns = wilder_.Below(2) ? 128 : wilder_.Size();
    problem.in = wilder_.Pick<DType>({DType::kBF16, DType::kF32, DType::kE4M3, DType::kE5M2});
    problem.out = wilder_.Pick<DType>({DType::kE4M3, DType::kS8, DType::kS8});
    problem.given_scale = wilder_.Below(2), problem.amax = wilder_.Below(2);
    problem.transposed = wilder_.Below(4) == 0, problem.transposed_scale = wilder_.Below(8) == 0;
    if (wilder_.Below(8) == 0) {  // the form with scales of both layouts
      problem.in = DType::kBF16, problem.out = DType::kE4M3;
      problem.tile_rows = 1, problem.tile_columns = 128;
      problem.given_scale = problem.amax = false;
      problem.transposed = problem.transposed_scale = true;
    }
    if (!QuantizeWhyNot(problem).ok()) return;
    ++quantized_, rounded_again_ += IsFloat8(problem.in), turned_ += problem.transposed_scale;
    Expect(QuantizeWorkspace(problem) <= size_t{1} << 20, "quantizing asks for too much scratch");
  }

  int Report() {
    Expect(accepted_ > 100 && planned_ > 100 && run_ > 100 && quantized_ > 10 &&
               rounded_again_ > 3 && turned_ > 3,
           "hardly anything is accepted");
    std::printf(
        "  fuzz: %d specs accepted, %d planned, %d run, %d quantizers, %d of FP8, %d failures\n",
        accepted_, planned_, run_, quantized_, rounded_again_, failures);
    return failures != 0;
  }

 private:
  bool AskForScratch(const jaxfp8_scaled_dot_spec& spec, const std::string& name,
                     const Wild& wild) {
    const Message message(wilder_.Pick<int64_t>({0, 1, 40, 512}));
    const int capability = wilder_.Pick<int>({-1, 0, 80, 90, 100, 1 << 30});
    const int status =
        jaxfp8_cuda_workspace(&spec, capability, &bytes_, message.data(), message.size());
    ExpectAnswer(status, message, "scratch of " + name);
    Expect(jaxfp8_cuda_workspace(&spec, 0, nullptr, message.data(), message.size()) != JAXFP8_OK,
           name + ": told to no one");
    if (status != JAXFP8_OK) return false;
    Expect(!IsBeyondLimits(wild), "too large, but accepted: " + name);
    Expect(bytes_ > 0 && bytes_ <= kMaxWorkspace, name + ": " + std::to_string(bytes_) + " bytes");
    ++accepted_;
    return true;
  }

  void AskForRoute(const jaxfp8_scaled_dot_spec& spec, const std::string& name, bool accepted) {
    const Message message(wilder_.Pick<int64_t>({0, 1, 40, 4096}));
    const int capability = wilder_.Pick<int>({-1, 0, 75, 80, 86, 89, 90, 100, 120, 1 << 30});
    const int version = wilder_.Pick<int>({-1, 0, 130000, 130100, 1 << 30});
    const int status =
        jaxfp8_cuda_route(&spec, capability, version, message.data(), message.size());
    ExpectAnswer(status, message, "route of " + name);
    Expect(status != JAXFP8_OK || accepted, "refused scratch, but routed: " + name);
  }

  void MakePlan(const jaxfp8_scaled_dot_spec& spec, const std::string& name, bool accepted) {
    current_device = static_cast<int>(wilder_.Below(3)) - 1;
    const Message message(512);
    const size_t bytes = wilder_.Pick<size_t>({0, 256, 40000, 1 << 20, bytes_, ~size_t{0}});
    const int status = jaxfp8_cuda_prepare(&spec, bytes, message.data(), message.size());
    ExpectAnswer(status, message, "plan of " + name);
    Expect(status != JAXFP8_OK || (accepted && current_device >= 0), "planned: " + name);
    planned_ += status == JAXFP8_OK;
  }

  // With the workspace that was asked for a call must succeed. With less it may refuse, or where it
  // names a path that cannot: for the problem, or for cuBLASLt's stand-in.
  void Run(const Wild& wild, const jaxfp8_scaled_dot_spec& spec, const std::string& name) {
    if (bytes_ > size_t{48} << 20) return;
    const bool less = wilder_.Below(3) == 0;
    const size_t bytes = less ? wilder_.Below(static_cast<int64_t>(bytes_)) : bytes_;
    current_device = static_cast<int>(wilder_.Below(2));
    WildData data(wild, random_);
    const tests::Block workspace(static_cast<int64_t>(bytes));
    data.buffers().workspace = workspace.get();
    data.buffers().workspace_bytes = bytes;
    const Message message(1024);
    const int status =
        jaxfp8_cuda_scaled_dot(&spec, &data.buffers(), nullptr, message.data(), message.size());
    ExpectAnswer(status, message, "call of " + name);
    const std::string text = message.text();
    const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
    const bool cannot = says("` cannot: ") || says("attribute `kernel` is") ||
                        says("no kernel can: sm80_imma: ") || wild.kernel.find("cublaslt") == 0;
    Expect(status == JAXFP8_OK || less || cannot, "call of " + name + ": " + text);
    run_ += status == JAXFP8_OK;
  }

  std::mt19937_64 random_;
  Wilder wilder_;
  Drawer drawer_;
  size_t bytes_ = 0;
  int accepted_ = 0, planned_ = 0, run_ = 0, quantized_ = 0, rounded_again_ = 0, turned_ = 0;
};

}  // namespace
}  // namespace jaxfp8::cuda

int main(int count, char** arguments) {
  using namespace jaxfp8::tests;
  return RunFuzz<jaxfp8::cuda::Fuzz>(ReadOptions(count, arguments, 4000), 4);
}
