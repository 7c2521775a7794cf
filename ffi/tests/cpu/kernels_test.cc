// Every kernel against the reference.
//
//   kernels [--kernels PREFIX,PREFIX...] [--without PREFIX,PREFIX...] [--how WORDS]
//           [--claim PART_OF_A_NAME] [--case PART_OF_A_NAME] [--share N]
//           [--random COUNT] [--seed NUMBER]
//
// Says how long each claim took, and of each kernel compiled in whether this machine runs it.

#include <cstdlib>
#include <string>

#include "tests/cpu/harness.h"

// Wide gaps between allocations: a whole vector read behind one still falls into its gap.
extern "C" const char* __asan_default_options() { return "redzone=512"; }

int main(int count, char** arguments) {
  jaxfp8::tests::Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i], value = arguments[i + 1];
    if (name == "--kernels") options.kernels = value;
    if (name == "--without") options.without = value;
    if (name == "--how") options.how = value;
    if (name == "--claim") options.claim = value;
    if (name == "--case") options.instance = value;
    if (name == "--share") options.share = std::atoll(value.c_str());
    if (name == "--random") options.random = std::atoll(value.c_str());
    if (name == "--seed") options.seed = std::strtoull(value.c_str(), nullptr, 10);
  }
  return jaxfp8::tests::Harness(options).RunAll();
}
