// The C function of include/jaxfp8/jaxfp8.h for the CPU.

#include "common/abi.h"

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cpu/float_mode.h"
#include "cpu/run.h"

namespace jaxfp8 {
namespace {

// Threads for one call: there is no pool of the caller's to borrow from.
class OwnThreads : public Pool {
 public:
  explicit OwnThreads(int64_t helpers) : helpers_(helpers) {}
  ~OwnThreads() override {
    for (std::thread& thread : started_) thread.join();
  }
  OwnThreads(const OwnThreads&) = delete;
  OwnThreads& operator=(const OwnThreads&) = delete;

  int64_t threads() const override { return helpers_; }
  void Schedule(std::function<void()> task) override { started_.emplace_back(std::move(task)); }

 private:
  const int64_t helpers_;
  std::vector<std::thread> started_;
};

std::string Compute(const jaxfp8_scaled_dot_spec* spec, const jaxfp8_scaled_dot_buffers* from,
                    int threads) {
  Request request;
  std::string wrong = ReadRequest(spec, request);
  if (!wrong.empty()) return wrong;
  Buffers buffers;
  wrong = ReadBuffers(from, request.spec, buffers);
  if (!wrong.empty()) return wrong;
  const FloatMode mode;
  OwnThreads pool(threads > 1 ? threads - 1 : 0);
  return Run(request.spec, buffers, request.kernel, pool);
}

}  // namespace
}  // namespace jaxfp8

#pragma GCC visibility push(default)

extern "C" int jaxfp8_cpu_scaled_dot(const jaxfp8_scaled_dot_spec* spec,
                                     const jaxfp8_scaled_dot_buffers* buffers, int threads,
                                     char* message, size_t size) {
  return jaxfp8::Answer(message, size, [&] { return jaxfp8::Compute(spec, buffers, threads); });
}

#pragma GCC visibility pop
