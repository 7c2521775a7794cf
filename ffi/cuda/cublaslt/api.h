// cuBLASLt, opened at run time. We do not link it: our library must load without it.

#pragma once

#include <cublasLt.h>

#include <string>

#include "common/status.h"

namespace jaxfp8::cuda {

// The functions used, each by its name without the prefix `cublasLt`, and by that of its symbol.
#define JAXFP8_CUBLASLT(V)                                       \
  V(GetVersion, cublasLtGetVersion)                              \
  V(GetStatusName, cublasLtGetStatusName)                        \
  V(Create, cublasLtCreate)                                      \
  V(Matmul, cublasLtMatmul)                                      \
  V(MatmulAlgoGetHeuristic, cublasLtMatmulAlgoGetHeuristic)      \
  V(MatmulAlgoCheck, cublasLtMatmulAlgoCheck)                    \
  V(MatmulDescInit, cublasLtMatmulDescInit_internal)             \
  V(MatmulDescSetAttribute, cublasLtMatmulDescSetAttribute)      \
  V(MatrixLayoutInit, cublasLtMatrixLayoutInit_internal)         \
  V(MatrixLayoutSetAttribute, cublasLtMatrixLayoutSetAttribute)  \
  V(MatmulPreferenceInit, cublasLtMatmulPreferenceInit_internal) \
  V(MatmulPreferenceSetAttribute, cublasLtMatmulPreferenceSetAttribute)

struct CublasLt {
#define JAXFP8_FUNCTION(name, symbol) decltype(&symbol) name;
  JAXFP8_CUBLASLT(JAXFP8_FUNCTION)
#undef JAXFP8_FUNCTION

  int version = 0;   // such as 130100
  std::string path;  // of the file in use
};

// The library, opened once per process. Fails if none is recent enough.
//
// It is the copy that the process has loaded already, else the one at the path given to
// `SetCublasLtPath`, else the one that the loader finds in the system or in our RUNPATH. A copy
// that is loaded already is used even if it is older; `path` and `version` say which it is.
Status OpenCublasLt(const CublasLt*& library);

// Sets the first place to look; "" for none. Has no effect once the library is open.
void SetCublasLtPath(const std::string& path);

// The handle of the current device, created on first use and kept.
Status CublasLtHandle(int ordinal, cublasLtHandle_t& handle);

// "`what` failed: CUBLAS_STATUS_NOT_SUPPORTED", or success.
Status CublasLtError(cublasStatus_t status, const char* what);

}  // namespace jaxfp8::cuda
