#include "tests/cpu/harness.h"

#include <chrono>
#include <cstdio>
#include <sstream>
#include <utility>

#include "include/jaxfp8/jaxfp8.h"
#include "tests/cpu/call.h"
#include "tests/cpu/internals.h"

namespace jaxfp8::tests {
namespace {

constexpr int kMaxReported = 20;

using NamedClaim = std::pair<std::string, void (*)(Harness&)>;

std::vector<NamedClaim>& AllClaims() {
  static std::vector<NamedClaim> all;
  return all;
}

// Whether a name begins with one of the prefixes.
bool Named(const std::string& prefixes, const std::string& name) {
  std::istringstream all(prefixes);
  for (std::string prefix; std::getline(all, prefix, ',');) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

// FNV-1a: the same number in every run, by every compiler.
uint64_t HashOf(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  }
  return hash;
}

}  // namespace

Claim::Claim(const char* name, void (*check)(Harness&)) { AllClaims().push_back({name, check}); }

bool TestedKernel::IsNamed(const std::string& prefixes) const { return Named(prefixes, name); }

bool TestedKernel::Takes(const Case& of) const {
  if (SumsIntegers()) return IsInt8(of.lhs.dtype) && IsInt8(of.rhs.dtype);
  if (of.out_dtype == DType::kS32) return false;
  if (!TakesOnlyBF16()) return true;
  for (const SideCase* side : {&of.lhs, &of.rhs}) {
    const bool fits = side->dtype == DType::kBF16 || IsEightBit(side->dtype);
    if (!fits || side->zero_point) return false;
  }
  return true;
}

Harness::Harness(const Options& options) : options_(options) {
  int index = -1;
  for (const CompiledKernel& kernel : CompiledKernels()) {
    ++index;
    const bool named = options.kernels.empty() || Named(options.kernels, kernel.name);
    if (!named || Named(options.without, kernel.name)) continue;
    if (kernel.runs_here) {
      kernels_.push_back({kernel.name, index});
    } else {
      absent_.push_back(kernel.name);
    }
  }
}

bool Harness::Begin(const std::string& instance, Cost cost) {
  if (instance.find(options_.instance) == std::string::npos) return false;
  const uint64_t hash = HashOf(claim_ + "/" + instance);
  // Finished by multiplying: the low bits of the hash of similar names are similar.
  const uint64_t place = (hash * 0x9e3779b97f4a7c15u) >> 32;
  if (cost == Cost::kLarge && begun_ > 0 && place % static_cast<uint64_t>(options_.share) != 0) {
    ++left_out_;
    return false;
  }
  ++begun_;
  instance_ = instance;
  random_.seed(hash ^ options_.seed);
  return true;
}

void Harness::ForEachKernel(const Case& of, const Operands& operands, const Judge& judge) {
  for (TestedKernel& kernel : kernels_) {
    if (kernel.Takes(of)) {
      const Results results = Run(kernel, of, operands);
      const std::string wrong = judge(kernel, results);
      if (!wrong.empty()) Fail(kernel.name, of.Text() + ": " + wrong);
    } else {
      std::string message;
      const Results results = SoiledResults(of);
      const int status = Call(of, operands, results, kernel.name.c_str(), 1, message);
      Expect(status == JAXFP8_INVALID_ARGUMENT, kernel, of.Text() + ": is not refused");
    }
  }
}

void Harness::Check(const Case& of, const Operands& operands) {
  const Exact exact = Compute(of, operands);
  ForEachKernel(of, operands, [&](TestedKernel&, const Results& results) {
    return WhyBeyondBound(of, exact, results);
  });
}

void Harness::CheckExact(const Case& of, const Operands& operands) {
  const Exact exact = Compute(of, operands);
  ForEachKernel(of, operands,
                [&](TestedKernel&, const Results& results) { return WhyNotExact(exact, results); });
}

void Harness::Draw(const Case& of, Values values, Cost cost) {
  const std::string special = values == Values::kSpecial ? ", with NaN and infinities" : "";
  if (Begin(of.Text() + special, cost)) Check(of, DrawOperands(of, values, random_));
}

Results Harness::Run(TestedKernel& kernel, const Case& of, const Operands& operands, int threads) {
  Results results = SoiledResults(of);
  SoilScratch();
  const uint64_t before = CallsOfKernel(kernel.index);
  std::string message;
  const int status = Call(of, operands, results, kernel.name.c_str(), threads, message);
  Expect(status == JAXFP8_OK, kernel, of.Text() + ": is refused: " + message);
  const uint64_t counted = CallsOfKernel(kernel.index) - before;
  Expect(status != JAXFP8_OK || counted == 1, kernel, of.Text() + ": another kernel is counted");
  ++kernel.cases;
  return results;
}

void Harness::Expect(bool holds, const std::string& what) {
  if (!holds) Fail("all kernels", what);
}

void Harness::Expect(bool holds, const TestedKernel& kernel, const std::string& what) {
  if (!holds) Fail(kernel.name, what);
}

void Harness::Fail(const std::string& kernel, const std::string& what) {
  if (++failures_ > kMaxReported) return;
  const std::string place = what.starts_with(instance_) ? "" : instance_ + ": ";
  std::printf("FAILED: %s: %s: %s%s\n", claim_.c_str(), kernel.c_str(), place.c_str(),
              what.c_str());
}

bool Harness::Has(const std::string& kernel) const {
  for (const TestedKernel& tested : kernels_) {
    if (tested.name == kernel) return true;
  }
  return false;
}

int Harness::RunAll() {
  for (const auto& [name, check] : AllClaims()) {
    if (name.find(options_.claim) == std::string::npos) continue;
    claim_ = name;
    begun_ = left_out_ = 0;
    const auto start = std::chrono::steady_clock::now();
    check(*this);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (begun_ == 0 && options_.instance.empty()) Fail("all kernels", "no case was run");
    std::printf("  %7.2f s %6lld cases %6lld left out  %s\n", seconds.count(),
                static_cast<long long>(begun_), static_cast<long long>(left_out_), name.c_str());
    std::fflush(stdout);
  }
  Report();
  return failures_ != 0 || (kernels_.empty() && absent_.empty());
}

void Harness::Report() const {
  for (const TestedKernel& kernel : kernels_) {
    std::printf("  %-14s %s, %lld calls\n", kernel.name.c_str(), options_.how.c_str(),
                static_cast<long long>(kernel.cases));
  }
  for (const std::string& kernel : absent_) {
    std::printf("  %-14s not run: this CPU lacks its instructions (it has: %s)\n", kernel.c_str(),
                FeaturesHere().c_str());
  }
  if (kernels_.empty() && absent_.empty()) std::printf("FAILED: no kernel has such a name\n");
  std::printf("  %d failures\n", failures_);
}

}  // namespace jaxfp8::tests
