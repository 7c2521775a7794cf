#include "cuda/cublaslt/plan_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>

namespace jaxfp8::cuda {
namespace {

constexpr char kHeader[] = "# jaxfp8 plans 1";
constexpr size_t kWords = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t);
constexpr size_t kDigits = 16;

struct PlanFile {
  std::mutex mutex;
  std::string path;
  std::map<std::string, cublasLtMatmulAlgo_t> known;
};

PlanFile& TheFile() {
  static PlanFile* file = new PlanFile;
  return *file;
}

Status Read(std::ifstream& from, const std::string& path,
            std::map<std::string, cublasLtMatmulAlgo_t>& known) {
  std::string line;
  std::getline(from, line);
  if (line != kHeader) {
    return "`" + path + "` is not a file of plans: it begins with `" + line.substr(0, 40) +
           "`, but needs to with `" + kHeader + "`";
  }
  while (std::getline(from, line)) {
    const size_t space = line.rfind(' ');
    cublasLtMatmulAlgo_t algorithm;
    // Skips lines not yet finished by another process.
    if (space == std::string::npos || !ReadAlgorithm(line.substr(space + 1), algorithm)) continue;
    known[line.substr(0, space)] = algorithm;
  }
  return {};
}

// Creates the file if there is none.
Status Touch(const std::string& path) {
  std::ofstream file(path, std::ios::app);
  if (file && file.tellp() == 0) file << kHeader << std::endl;
  return file ? "" : "`" + path + "` cannot be written to: " + std::strerror(errno);
}

}  // namespace

Status SetPlanFile(const std::string& path) {
  std::map<std::string, cublasLtMatmulAlgo_t> known;
  if (!path.empty()) {
    JAXFP8_RETURN_IF_ERROR(Touch(path));
    std::ifstream from(path);
    JAXFP8_RETURN_IF_ERROR(Read(from, path, known));
  }
  PlanFile& file = TheFile();
  const std::lock_guard lock(file.mutex);
  file.path = path;
  file.known = std::move(known);
  return {};
}

bool RecallAlgorithm(const std::string& product, cublasLtMatmulAlgo_t& algorithm) {
  PlanFile& file = TheFile();
  const std::lock_guard lock(file.mutex);
  const auto found = file.known.find(product);
  if (found == file.known.end()) return false;
  algorithm = found->second;
  return true;
}

void KeepAlgorithm(const std::string& product, const cublasLtMatmulAlgo_t& algorithm) {
  PlanFile& file = TheFile();
  const std::lock_guard lock(file.mutex);
  if (file.path.empty()) return;
  file.known[product] = algorithm;
  // One write: lines of several processes must not mix.
  const std::string line = product + " " + WriteAlgorithm(algorithm) + "\n";
  std::ofstream to(file.path, std::ios::app);
  to.write(line.data(), static_cast<std::streamsize>(line.size()));
}

std::string WriteAlgorithm(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text;
  for (uint64_t word : algorithm.data) {
    char digits[kDigits + 1];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(word));
    text += digits;
  }
  return text;
}

bool ReadAlgorithm(const std::string& text, cublasLtMatmulAlgo_t& algorithm) {
  if (text.size() != kWords * kDigits) return false;
  if (text.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
  for (size_t i = 0; i < kWords; ++i) {
    algorithm.data[i] = std::stoull(text.substr(i * kDigits, kDigits), nullptr, 16);
  }
  return true;
}

}  // namespace jaxfp8::cuda
