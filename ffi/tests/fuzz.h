// The main loop of the fuzzers of the C interfaces, and what a call may answer.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

#include "include/jaxfp8/jaxfp8.h"
#include "tests/expect.h"
#include "tests/wild_data.h"

namespace jaxfp8::tests {

// A call succeeds or refuses its arguments with a reason, and its message ends in the buffer.
inline void ExpectAnswer(int status, const Message& message, const std::string& name) {
  const bool refused = status == JAXFP8_INVALID_ARGUMENT;
  Expect(status == JAXFP8_OK || refused,
         name + ": status " + std::to_string(status) + ", " + message.text());
  Expect(message.IsEnded(), name + ": the message has no end");
  Expect(!refused || message.size() < 2 || !message.text().empty(), name + ": no reason is given");
}

struct FuzzOptions {
  int64_t specs;  // how many to try
  uint64_t seed = 1;
};

// Reads [--specs COUNT] [--seed NUMBER].
inline FuzzOptions ReadOptions(int count, char** arguments, int64_t specs) {
  FuzzOptions options{specs};
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i];
    if (name == "--specs") options.specs = std::atoll(arguments[i + 1]);
    if (name == "--seed") options.seed = std::strtoull(arguments[i + 1], nullptr, 10);
  }
  return options;
}

// Runs `Fuzz` on random specs, and on `quantizers` quantize problems for every 4 specs. Returns the
// exit status of the program.
template <typename Fuzz>
int RunFuzz(const FuzzOptions& options, int64_t quantizers) {
  Fuzz fuzz(options.seed);
  for (int64_t i = 0; i < options.specs; ++i) fuzz.RunSpec();
  for (int64_t i = 0; i < options.specs * quantizers / 4; ++i) fuzz.RunQuantize();
  return fuzz.Report();
}

}  // namespace jaxfp8::tests
