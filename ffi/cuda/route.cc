#include "cuda/route.h"

#include <algorithm>
#include <utility>

#include "cuda/cublaslt/attempts.h"
#include "cuda/kernels/general/general.h"
#include "cuda/kernels/sm80_w8a16/schedule.h"
#include "cuda/kernels/sm90/operands.h"
#include "cuda/kernels/sm90_gemm/path.h"

namespace jaxfp8::cuda {
namespace {

// FP8 with scales that change along K. There `sm90_gemm` is faster than cuBLASLt, which needs
// copies of the scales and is slower with them; else cuBLASLt is.
bool ScalesSteps(const Problem& problem) {
  return VariesAlongDepth(problem.lhs) || VariesAlongDepth(problem.rhs);
}

// Lines of the 16-bit side beside 8-bit weights.
int64_t WideLines(const Problem& problem) {
  return IsEightBit(problem.rhs.dtype) ? problem.rows : problem.columns;
}

// An 8-bit output takes a division for each value, which `sm90_gemm` does while its tensor cores
// wait. With more rows cuBLASLt and an epilogue kernel are faster: with int8 on an H100 1.07x with
// 2048 x 5120 x 5120, but 0.91x with 1024 x 8192 x 8192; with FP8 1.04x to 1.17x.
constexpr int64_t kMaxDividedRows = 1024;

bool DividesMany(const Problem& problem) {
  return IsEightBit(problem.out.dtype) && problem.rows > kMaxDividedRows;
}

// Up to so many rows `sm90_gemm` is faster than cuBLASLt with scales of rows and columns: on an
// H100 256 x 4096 x 4096 takes 9.4 us, not 12.9, but 512 rows of 4096 x 14336 take 41.4, not 40.1.
constexpr int64_t kMaxVectorRows = 256;

// Whether `sm90_gemm` multiplies FP8 faster than cuBLASLt does, though no scales change along K:
// where cuBLASLt leaves sums in memory for an epilogue kernel, and with few rows. On an H100 4096 x
// 8192 x 8192 with a bias takes 369 us, not 418; 8192 x 14336 x 4096 takes 671, not 892.
bool SumsInRegisters(const Problem& problem, const Device& device) {
  const bool floats = IsFloat8(problem.lhs.dtype) && IsFloat8(problem.rhs.dtype);
  if (!floats || !sm90::SumsFirst(problem) || DividesMany(problem)) return false;
  const Scaling scaling = Attempts(problem, device).front().scaling;
  return scaling == Scaling::kEpilogue ||
         (scaling == Scaling::kOuterVectors && problem.rows <= kMaxVectorRows);
}

// The table of routes: a path stands before every path that it is faster than. `sm80_imma` computes
// another number, and has to be asked for. For int8 `sm90_gemm` leaves no sums in memory: on an
// H100 4096 x 8192 x 8192 takes 391 us, not 472, and 64 rows take 27, not 32.
std::vector<const Path*> InOrder(const Problem& given, const Device& device,
                                 std::string_view name) {
  if (name == kInInt8) return {&kSm80Imma};
  const Problem problem = WithEvenGroups(given);
  std::vector<const Path*> order = {&kCublasLtFp8, &kSm90Gemm, &kCublasLtInt8};
  if (ScalesSteps(problem) || SumsInRegisters(problem, device)) std::swap(order[0], order[1]);
  if (IsInt8(problem.lhs.dtype) && DividesMany(problem)) std::swap(order[1], order[2]);
  const bool skinny = IsSkinny(problem);
  const bool mixed = IsEightBit(problem.lhs.dtype) != IsEightBit(problem.rhs.dtype);
  const bool late = mixed && !FillsHopper(given);
  if (late) std::erase(order, &kSm90Gemm);
  order.insert(skinny && !mixed ? order.begin() : order.end(),
               skinny ? &kSm80W8A16 : &kCublasLtWide);
  order.push_back(skinny ? &kCublasLtWide : &kSm80W8A16);
  // It takes products whose scales change too often for the paths in 8 bits.
  order.insert(order.begin(), &kDecodedW8A16);
  if (late) order.push_back(&kSm90Gemm);
  order.push_back(&kGeneral);
  return order;
}

// Why a path cannot compute a problem on a device.
Status WhyNot(const Path& path, const Problem& problem, const Device& device) {
  const bool plain = problem.lhs.HasPlainScales() && problem.rhs.HasPlainScales();
  if (!plain && !path.reads_any_scale) {
    return "it reads scales of float32 alone, and does not round them";
  }
  if (problem.grouping != Grouping::kNone && !path.takes_groups) return "it takes no groups";
  if (problem.inner_batch > 1 && !path.reads_batch_jumps) {
    return "it needs one stride along the batch, and an operand has two batch axes without";
  }
  return path.why_not(problem, device);
}

Route Named(const Problem& problem, const Device& device, std::string_view name) {
  std::string known;
  for (const Path* path : AllPaths()) {
    if (path->name != name) {
      known += (known.empty() ? "" : ", ") + std::string(path->name);
      continue;
    }
    const Status why_not = WhyNot(*path, problem, device);
    if (why_not.ok()) return {path, ""};
    return {nullptr, "kernel `" + std::string(name) + "` cannot: " + why_not.message()};
  }
  known += ", " + std::string(kInInt8);
  return {nullptr, "attribute `kernel` is `" + std::string(name) + "`, but needs one of: " + known};
}

}  // namespace

const Path kGeneral{"general", GeneralWhyNot, PlanGeneral, true, true};

const std::vector<const Path*>& AllPaths() {
#define JAXFP8_ADDRESS(symbol, name) &symbol,
  static const std::vector<const Path*> paths = {JAXFP8_CUDA_PATHS(JAXFP8_ADDRESS)};
#undef JAXFP8_ADDRESS
  return paths;
}

bool IsSkinny(const Problem& problem) {
  if (IsFloat8(problem.lhs.dtype) && IsFloat8(problem.rhs.dtype)) {
    return std::min(problem.rows, problem.columns) <= w8a16::kMaxFloat8Rows;
  }
  return WideLines(problem) <= kSkinnyRows;
}

bool FillsHopper(const Problem& problem) {
  if (GroupsRows(problem)) {
    const Problem even = WithEvenGroups(problem);
    return WideLines(even) >= kManyGroupedRows && even.depth >= kMinGroupedDepth;
  }
  const double outputs = static_cast<double>(problem.batch) * static_cast<double>(problem.rows) *
                         static_cast<double>(problem.columns);
  if (WideLines(problem) < kManyRows || problem.depth < kMinDepth) return false;
  return !IsSkinny(problem) || outputs > kFewOutputs;
}

std::vector<Choice> Choices(const Problem& problem, const Device& device, std::string_view name) {
  std::vector<Choice> choices;
  for (const Path* path : InOrder(problem, device, name)) {
    choices.push_back({path, WhyNot(*path, problem, device)});
  }
  return choices;
}

Route RouteTo(const Problem& problem, const Device& device, std::string_view name) {
  if (!name.empty() && name != kInInt8) return Named(problem, device, name);
  std::string reasons;
  for (const Choice& choice : Choices(problem, device, name)) {
    if (choice.why_not.ok()) return {choice.path, ""};
    reasons += (reasons.empty() ? "" : "; ") + choice.why_not.In(choice.path->name).message();
  }
  return {nullptr, "no kernel can: " + reasons};
}

Device SmallestDevice(int compute_capability, int cublaslt_version) {
  Device device;
  device.compute_capability = compute_capability;
  device.cublaslt_version = cublaslt_version;
  device.multiprocessors = 1;
  // Per block, opted in. Datacentre chips have more than others of their generation.
  const bool large = compute_capability >= 90 && compute_capability < 120;
  device.shared_bytes = large ? 227 << 10 : compute_capability == 80 ? 163 << 10 : 99 << 10;
  return device;
}

}  // namespace jaxfp8::cuda
