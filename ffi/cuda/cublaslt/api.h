// cuBLASLt, opened at run time: the library is never linked, so that ours loads where it is absent.

#ifndef JAXFP8_CUDA_CUBLASLT_API_H_
#define JAXFP8_CUDA_CUBLASLT_API_H_

#include <cublasLt.h>

#include <string>

namespace jaxfp8::cuda {

// The functions used, each under its name without the prefix `cublasLt`.
struct CublasLt {
  decltype(&cublasLtGetVersion) GetVersion;
  decltype(&cublasLtGetStatusName) GetStatusName;
  decltype(&cublasLtCreate) Create;
  decltype(&cublasLtMatmul) Matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic;
  decltype(&cublasLtMatmulAlgoCheck) MatmulAlgoCheck;
  decltype(&cublasLtMatmulDescInit_internal) MatmulDescInit;
  decltype(&cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  decltype(&cublasLtMatrixLayoutInit_internal) MatrixLayoutInit;
  decltype(&cublasLtMatrixLayoutSetAttribute) MatrixLayoutSetAttribute;
  decltype(&cublasLtMatmulPreferenceInit_internal) MatmulPreferenceInit;
  decltype(&cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;

  int version = 0;   // such as 130100
  std::string path;  // of the file in use
};

// The library, opened once per process; null with `wrong` set where there is none that fits.
//
// Looked for where the process has it already, then at the path given to `SetCublasLtPath`, then
// where the system's loader and the RUNPATH of this library find it. An older copy that is loaded
// already wins, as it does for everyone in the process: `path` and `version` say which it is.
const CublasLt* OpenCublasLt(std::string& wrong);

// Where to look first, "" for nowhere in particular; without effect once the library is open.
void SetCublasLtPath(const std::string& path);

// The handle of a device, made on first use and kept; null with `wrong` set on failure. The device
// is the current one.
cublasLtHandle_t CublasLtHandle(int ordinal, std::string& wrong);

// "`what` failed: CUBLAS_STATUS_NOT_SUPPORTED", or "" for success.
std::string CublasLtError(cublasStatus_t status, const char* what);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_CUBLASLT_API_H_
