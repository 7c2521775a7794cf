#include "cuda/route.h"

#include "cuda/cublaslt/paths.h"
#include "cuda/kernels/general.h"
#include "cuda/kernels/sm80_w8a16.h"

namespace jaxfp8::cuda {
namespace {

constexpr Path kGeneral{"general", GeneralWhyNot, PlanGeneral};

// Up to so many rows the weights are what takes time: they are read once, as they are. Beyond it
// decoding them for the library's 16-bit product pays. On an H200 with e4m3 weights, `sm80_w8a16`
// against `cublaslt_wide`, in us: of 14336 x 4096, 128 rows 61 and 97, 192 rows 93 and 122, 256
// rows 119 and 117; of 28672 x 8192, 128 rows 190 and 465, 256 rows 384 and 423.
constexpr int64_t kFewRows = 256;

// The side of 16 bits has few lines.
bool FewRows(const Problem& problem) {
  return (IsEightBit(problem.rhs.dtype) ? problem.rows : problem.columns) <= kFewRows;
}

// The table of preferences: a path stands before all that it beats wherever both can.
std::vector<const Path*> InOrder(const Problem& problem) {
  if (FewRows(problem)) {
    return {&kCublasLtFp8, &kCublasLtInt8, &kSm80W8A16, &kCublasLtWide, &kGeneral};
  }
  return {&kCublasLtFp8, &kCublasLtInt8, &kCublasLtWide, &kSm80W8A16, &kGeneral};
}

Route Named(const Problem& problem, const Device& device, std::string_view name) {
  std::string known;
  for (const Path* path : AllPaths()) {
    if (path->name != name) {
      known += (known.empty() ? "" : ", ") + std::string(path->name);
      continue;
    }
    const std::string reason = path->why_not(problem, device);
    if (reason.empty()) return {path, ""};
    return {nullptr, "kernel `" + std::string(name) + "` cannot: " + reason};
  }
  return {nullptr, "attribute `kernel` is `" + std::string(name) + "`, but needs one of: " + known};
}

}  // namespace

const std::vector<const Path*>& AllPaths() {
  static const std::vector<const Path*> paths = {&kCublasLtFp8, &kCublasLtInt8, &kSm80W8A16,
                                                 &kCublasLtWide, &kGeneral};
  return paths;
}

std::vector<Choice> Choices(const Problem& problem, const Device& device) {
  std::vector<Choice> choices;
  for (const Path* path : InOrder(problem)) {
    choices.push_back({path, path->why_not(problem, device)});
  }
  return choices;
}

Route RouteTo(const Problem& problem, const Device& device, std::string_view name) {
  if (!name.empty()) return Named(problem, device, name);
  std::string reasons;
  for (const Choice& choice : Choices(problem, device)) {
    if (choice.why_not.empty()) return {choice.path, ""};
    reasons +=
        (reasons.empty() ? "" : "; ") + std::string(choice.path->name) + ": " + choice.why_not;
  }
  return {nullptr, "no kernel can: " + reasons};
}

}  // namespace jaxfp8::cuda
