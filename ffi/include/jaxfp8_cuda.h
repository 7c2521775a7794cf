/* The C functions of libjaxfp8_cuda, besides its XLA FFI handlers.
 * jaxfp8/jaxfp8.h has the functions for products.
 *
 * Returned strings belong to the library and live as long as the library. A text is truncated to
 * the size of the caller's buffer and ended by a 0. All functions may be called from any thread,
 * and none needs a GPU or a driver unless it says so.
 */

#ifndef JAXFP8_CUDA_H_
#define JAXFP8_CUDA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the package this library was built for. */
const char* jaxfp8_version(void);

/* The version of the XLA FFI headers this library was built against. */
void jaxfp8_ffi_api_version(int* major, int* minor);

/* The architectures compiled in, as CMake names them, such as "80-real 90a-real 80-virtual". */
const char* jaxfp8_cuda_architectures(void);

/* The paths (ways to compute a product): their number, their names, and the number of calls
 * computed by each. An index out of range gives "" or 0. */
int jaxfp8_cuda_kernel_count(void);
const char* jaxfp8_cuda_kernel_name(int kernel);
uint64_t jaxfp8_cuda_kernel_calls(int kernel);

/* Sets every count of calls to 0. */
void jaxfp8_cuda_reset_counters(void);

/* Sets the first path to look for libcublasLt.so.13; "" for none. Has no effect once the library is
 * open, or if the process has loaded it already. */
void jaxfp8_cuda_set_cublaslt(const char* path);

/* Opens libcublasLt.so.13, writes its path and returns its version, such as 130100. If none is
 * recent enough, writes the reason and the remedy, and returns 0. */
int jaxfp8_cuda_cublaslt(char* text, size_t size);

/* Sets whether the first call of a product on a device may time candidates to find the fastest. It
 * takes some tens of milliseconds and device memory of its own. Allowed at first. */
void jaxfp8_cuda_allow_timing(int allowed);

/* Keeps the results of timing in a file. From then on, in this process and in others, a product in
 * the file runs with the same algorithm and is not timed. "" or null ends this. Returns 1, or 0
 * after writing the error. */
int jaxfp8_cuda_set_plan_file(const char* path, char* text, size_t size);

#ifdef __cplusplus
}
#endif

#endif /* JAXFP8_CUDA_H_ */
