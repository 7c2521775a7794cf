// Claims of a C++ test program: each that fails is printed and counted.

#pragma once

#include <cstdio>
#include <string>

namespace jaxfp8::tests {

inline int failures = 0;

// Prints at most 20 claims.
inline void Expect(bool holds, const std::string& claim) {
  if (!holds && ++failures <= 20) std::printf("FAILED: %s\n", claim.c_str());
}

// Prints how many claims failed; returns the exit status of the program.
inline int Report(const char* program) {
  std::printf("%s: %d failures\n", program, failures);
  return failures != 0;
}

}  // namespace jaxfp8::tests
