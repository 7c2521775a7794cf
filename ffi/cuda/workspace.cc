// How much scratch memory a call should bring.

#include <algorithm>

#include "cuda/cublaslt/paths.h"
#include "cuda/kernels/decoded/path.h"
#include "cuda/kernels/sm80_imma/schedule.h"
#include "cuda/kernels/sm80_w8a16/schedule.h"
#include "cuda/kernels/sm90/operands.h"
#include "cuda/kernels/sm90_gemm/path.h"
#include "cuda/kernels/sm90_w8a16/schedule.h"
#include "cuda/route.h"

namespace jaxfp8::cuda {
namespace {

constexpr double kMiB = 1 << 20;
// NVIDIA recommends 32 MiB for cuBLASLt on Hopper. The rest is for counters, and to round each
// piece to 256 bytes.
constexpr double kLibraryBytes = 33 * kMiB;
// Decoded weights and accumulators. On an H200 W8A16 with 4096 rows of 14336 x 4096 weights takes
// 870 us with these, and 1170 with pieces of 97 MiB in all.
constexpr double kMaxSlabBytes = 256 * kMiB;
// Accumulators where the library is expected to write the output itself.
constexpr double kSpareBytes = 64 * kMiB;
// For paths that need none: no result of a call is empty.
constexpr double kMinBytes = 256;

constexpr int kHopper = 90;
// Any version that the paths by cuBLASLt take.
constexpr int kCublasLt = 130000;

// The bytes of an 8-bit operand as 16-bit values; 0 for one that is not decoded.
double DecodedBytes(const Problem& problem, const Side& side) {
  const double decoded_bytes = IsEightBit(side.dtype) ? 2 : 0;
  return decoded_bytes * LinesOf(problem, side) * (static_cast<double>(problem.depth) + 16);
}

double Packed(const Problem& problem) {
  const Side &lhs = problem.lhs, &rhs = problem.rhs;
  const bool mixed = IsEightBit(lhs.dtype) != IsEightBit(rhs.dtype);
  const Side& wide = IsEightBit(lhs.dtype) ? rhs : lhs;
  const bool folds = lhs.HasExponents() || rhs.HasExponents();
  const bool spare = !folds && (!mixed || LinesOf(problem, wide) <= kSkinnyRows);
  return std::min(spare ? kSpareBytes : kMaxSlabBytes,
                  DecodedBytes(problem, lhs) + DecodedBytes(problem, rhs));
}

// For the paths by cuBLASLt. In double, so that huge sizes do not overflow before the minimum.
double ForLibrary(const Problem& problem) {
  double acc = 4.0 * static_cast<double>(problem.batch) * static_cast<double>(problem.rows) *
               static_cast<double>(problem.columns);
  if (IsFloat8(problem.lhs.dtype) && IsFloat8(problem.rhs.dtype)) {
    acc = std::min(acc, kSpareBytes);
  }
  return kLibraryBytes + std::min(kMaxSlabBytes, Packed(problem) + acc);
}

double ForWeights(const Problem& problem) {
  return std::min(kMaxSlabBytes, static_cast<double>(w8a16::BestWorkspace(problem)));
}

// The sums that blocks of `sm90_gemm` leave beside 16-bit values.
double ForSharedUnits(const Problem& problem) {
  if (!sm90::IsMixed(problem)) return 0;
  const Problem p = sm90::WithWeightsOnLeft(problem);
  const bool wide = p.rhs.dtype == DType::kBF16 || p.rhs.dtype == DType::kF16;
  const sm90::TmaOperands operands = sm90::OperandsOf(p);
  const bool copied = operands.lhs.copied || operands.rhs.copied;
  return wide && !copied ? sm90::kMaxSharedUnitsBytes : 0;
}

// What is decoded, and the scratch of the product that follows.
double ForDecoded(const Problem& problem) {
  decoded::DecodedForm form;
  if (!decoded::MakeForm(problem, form).ok()) return 0;
  const Problem weights = w8a16::WithWeightsOnRight(form.product);
  const bool few = IsSkinny(form.product);
  const double sums = few && w8a16::WhyNotForm(weights).ok() ? ForWeights(weights) : 0;
  const double units = few && !FillsHopper(form.product) ? 0 : ForSharedUnits(form.product);
  return static_cast<double>(form.bytes) + std::max(sums, units);
}

double ForHopper(const Problem& problem) {
  const Side &lhs = problem.lhs, &rhs = problem.rhs;
  if (sm90::IsMixed(problem)) return ForSharedUnits(problem);
  const bool floats = IsFloat8(lhs.dtype) && IsFloat8(rhs.dtype);
  if (!floats && !(IsInt8(lhs.dtype) && IsInt8(rhs.dtype))) return 0;
  if (!sm90::WhyNotSizes(problem).ok()) return 0;  // refused
  return static_cast<double>(sm90::OperandsOf(problem).workspace);
}

double ForCodes(const Problem& problem) {
  const Problem oriented = imma::WithWeightsOnRight(problem);
  if (!imma::WhyNotForm(oriented).ok()) return 0;
  return static_cast<double>(imma::ScratchOf(oriented).bytes);
}

// Whether `sm90_gemm` sums 8-bit products in registers on every Hopper device. Elsewhere sums of
// integers, and of FP8 before an epilogue, are left in memory.
bool SumsInRegisters(const Problem& problem) {
  const Device device = SmallestDevice(kHopper, kCublasLt);
  return sm90::SumsFirst(problem) && RouteTo(problem, device, "").path == &kSm90Gemm;
}

double Bytes(const Problem& problem, std::string_view kernel, int compute_capability) {
  const Problem oriented = w8a16::WithWeightsOnRight(problem);
  const bool weights = w8a16::WhyNotForm(oriented).ok();
  const bool library = LibraryMayTake(problem);
  if (kernel.empty()) {
    if (compute_capability == kHopper && SumsInRegisters(problem)) {
      // Larger copies are left to cuBLASLt, which takes them in pieces.
      return std::min(ForHopper(problem), ForLibrary(problem));
    }
    const double decoded = ForDecoded(problem);
    if (decoded > 0) {
      const Device device = SmallestDevice(kHopper, kCublasLt);
      const bool known = compute_capability == kHopper;
      if (known && RouteTo(problem, device, "").path == &kDecodedW8A16) return decoded;
      return std::max(decoded, library ? ForLibrary(problem) : 0);
    }
    const bool may_be_hopper = compute_capability == kHopper || compute_capability == 0;
    const double units = may_be_hopper && FillsHopper(problem) ? ForSharedUnits(problem) : 0;
    if (weights && (IsSkinny(problem) || !library)) return std::max(units, ForWeights(oriented));
    return library ? ForLibrary(problem) : 0;
  }
  if (kernel == kSm90Gemm.name) return ForHopper(problem);
  if (kernel == kDecodedW8A16.name) return ForDecoded(problem);
  if (kernel == kSm80Imma.name || kernel == kInInt8) return ForCodes(problem);
  if (kernel == kSm80W8A16.name) return weights ? ForWeights(oriented) : 0;
  return library && kernel.starts_with("cublaslt") ? ForLibrary(problem) : 0;
}

}  // namespace

size_t WorkspaceFor(const Problem& problem, std::string_view kernel, int compute_capability) {
  return static_cast<size_t>(std::max(kMinBytes, Bytes(problem, kernel, compute_capability)));
}

}  // namespace jaxfp8::cuda
