// Runs claims about kernels: each is a function that tries cases on every kernel that takes them.
//
// The float64 reference of a case is computed once and every kernel is compared with it. A failure
// names the claim, the kernel and the case. Random numbers depend on the claim and the case alone,
// so one case runs by itself as it does among all.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/cpu/bound.h"
#include "tests/cpu/case.h"
#include "tests/cpu/operands.h"
#include "tests/cpu/reference.h"

namespace jaxfp8::tests {

struct Options {
  std::string kernels, without;  // prefixes of names, separated by commas
  std::string how = "natively";
  std::string claim, instance;  // run those alone whose name contains this
  int64_t share = 1;            // of the large cases, one in so many
  int64_t random = 600;         // problems of any form
  uint64_t seed = 1;
};

struct TestedKernel {
  std::string name;
  int index;  // among those compiled in
  int64_t cases = 0;

  bool SumsIntegers() const { return name.ends_with("_int8") || name.ends_with("_vnni"); }
  bool TakesOnlyBF16() const { return name.ends_with("_bf16"); }
  // Whether the name begins with one of the prefixes, which commas separate.
  bool IsNamed(const std::string& prefixes) const;
  // Whether it can compute a case at all, by the rules of docs/custom_call.md.
  bool Takes(const Case& of) const;
};

enum class Cost { kSmall, kLarge };

class Harness {
 public:
  explicit Harness(const Options& options);

  // Begins a case of the claim at hand. False if it is left out: by its name, or as one of the
  // large ones of which Options::share are run.
  bool Begin(const std::string& instance, Cost cost = Cost::kSmall);

  // What is wrong with the results of a kernel, as a sentence, or "".
  using Judge = std::function<std::string(TestedKernel&, const Results&)>;

  // Runs every kernel that takes the case; the others have to refuse it.
  void ForEachKernel(const Case& of, const Operands& operands, const Judge& judge);
  // Holds every kernel's results against the bound.
  void Check(const Case& of, const Operands& operands);
  // The same for values that every kernel has to find exactly.
  void CheckExact(const Case& of, const Operands& operands);
  // Begins a case named by its text, draws its operands and checks them against the bound.
  void Draw(const Case& of, Values values = Values::kFinite, Cost cost = Cost::kSmall);

  // The results of one kernel; a refusal is a failure, and so is a call that another one computes.
  Results Run(TestedKernel& kernel, const Case& of, const Operands& operands, int threads = 1);

  void Expect(bool holds, const std::string& what);
  void Expect(bool holds, const TestedKernel& kernel, const std::string& what);

  bool Has(const std::string& kernel) const;
  std::vector<TestedKernel>& kernels() { return kernels_; }
  Random& random() { return random_; }
  const Options& options() const { return options_; }

  // Runs the claims, and returns the exit status.
  int RunAll();

 private:
  void Fail(const std::string& kernel, const std::string& what);
  void Report() const;

  const Options options_;
  std::vector<TestedKernel> kernels_;
  std::vector<std::string> absent_;
  std::string claim_, instance_;
  Random random_;
  int64_t begun_ = 0, left_out_ = 0;
  int failures_ = 0;
};

// Adds a claim to those that RunAll runs.
struct Claim {
  Claim(const char* name, void (*check)(Harness&));
};

// Begins the function that checks a claim. The name is the claim.
#define CLAIM(name)                                              \
  static void name(::jaxfp8::tests::Harness& harness);           \
  static const ::jaxfp8::tests::Claim claim_##name(#name, name); \
  static void name(::jaxfp8::tests::Harness& harness)

}  // namespace jaxfp8::tests
