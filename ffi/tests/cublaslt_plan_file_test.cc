// The plan file returns the algorithms that were kept, in this process and the next, and no others.

#include <cstdio>
#include <fstream>
#include <string>

#include "cuda/cublaslt/plan_file.h"
#include "tests/expect.h"

using namespace jaxfp8::cuda;

namespace {

using jaxfp8::tests::Expect;

cublasLtMatmulAlgo_t Some(uint64_t seed) {
  cublasLtMatmulAlgo_t made;
  for (uint64_t& word : made.data) word = seed = seed * 6364136223846793005u + 1;
  return made;
}

bool Same(const cublasLtMatmulAlgo_t& a, const cublasLtMatmulAlgo_t& b) {
  return WriteAlgorithm(a) == WriteAlgorithm(b);
}

}  // namespace

int main() {
  const std::string path = "plans.txt";
  std::remove(path.c_str());
  cublasLtMatmulAlgo_t got;
  Expect(ReadAlgorithm(WriteAlgorithm(Some(1)), got) && Same(got, Some(1)), "text and back");
  Expect(!ReadAlgorithm(WriteAlgorithm(Some(1)).substr(1), got), "a line cut short is none");

  KeepAlgorithm("sm90_1", Some(1));
  Expect(!RecallAlgorithm("sm90_1", got), "nothing is kept without a file");
  Expect(SetPlanFile(path).ok(), "a file that does not exist yet is made");
  KeepAlgorithm("sm90_1", Some(1));
  KeepAlgorithm("sm90_2", Some(2));
  Expect(SetPlanFile("").ok() && !RecallAlgorithm("sm90_1", got), "no file, no plans");
  {
    std::ofstream(path, std::ios::app) << "sm90_3 0123";
  }
  Expect(SetPlanFile(path).ok(), "a line that is being written does no harm");
  Expect(RecallAlgorithm("sm90_1", got) && Same(got, Some(1)), "the first comes back");
  Expect(RecallAlgorithm("sm90_2", got) && Same(got, Some(2)), "the second comes back");
  Expect(!RecallAlgorithm("sm90_3", got), "half a line is no plan");

  {
    std::ofstream("other.txt") << "something else\n";
  }
  Expect(SetPlanFile("other.txt").message().find("is not a file of plans") != std::string::npos,
         "another file is refused");
  Expect(SetPlanFile("no/such/folder/plans.txt").message().find("cannot be written") !=
             std::string::npos,
         "a file that cannot be made is refused");
  return jaxfp8::tests::Report("plan file");
}
