// The C functions of include/jaxfp8_cuda.h.

#include "common/abi.h"
#include "cuda/cublaslt/api.h"
#include "cuda/cublaslt/plan_file.h"
#include "cuda/plans.h"
#include "cuda/route.h"
#include "include/jaxfp8_cuda.h"
#include "xla/ffi/api/c_api.h"

#pragma GCC visibility push(default)

extern "C" {

JAXFP8_LIBRARY_FUNCTIONS(cuda, jaxfp8::cuda::Calls)

const char* jaxfp8_cuda_architectures() { return JAXFP8_CUDA_ARCHITECTURES; }

void jaxfp8_cuda_set_cublaslt(const char* path) { jaxfp8::cuda::SetCublasLtPath(path ? path : ""); }

int jaxfp8_cuda_cublaslt(char* text, size_t size) {
  const jaxfp8::cuda::CublasLt* library = nullptr;
  const jaxfp8::Status status = jaxfp8::cuda::OpenCublasLt(library);
  jaxfp8::WriteText(status.ok() ? library->path : status.message(), text, size);
  return library ? library->version : 0;
}

void jaxfp8_cuda_allow_timing(int allowed) { jaxfp8::cuda::AllowTiming(allowed != 0); }

int jaxfp8_cuda_set_plan_file(const char* path, char* text, size_t size) {
  const jaxfp8::Status status = jaxfp8::cuda::SetPlanFile(path ? path : "");
  jaxfp8::WriteText(status.message(), text, size);
  return status.ok();
}

}  // extern "C"

#pragma GCC visibility pop
