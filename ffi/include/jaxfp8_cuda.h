/* The C functions of libjaxfp8_cuda beside its XLA FFI handlers `jaxfp8_scaled_dot` and
 * `jaxfp8_scaled_dot_initialize`. jaxfp8/jaxfp8.h has those that compute.
 *
 * Strings belong to the library and live as long as it, unless a buffer is given: that is filled up
 * to its size and always ends in 0. All functions may be called from any thread, and none needs a
 * GPU or a driver unless it says so.
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

/* The paths (ways to compute a product): how many, what they are called, and how many calls each
 * has computed. An index out of range gives "" or 0. */
int jaxfp8_cuda_kernel_count(void);
const char* jaxfp8_cuda_kernel_name(int kernel);
uint64_t jaxfp8_cuda_kernel_calls(int kernel);

/* Sets every count of calls to 0. */
void jaxfp8_cuda_reset_counters(void);

/* Where to look for libcublasLt.so.13 before the system's places; "" for nowhere in particular.
 * Without effect once it is open, and where the process has it already. */
void jaxfp8_cuda_set_cublaslt(const char* path);

/* Opens libcublasLt.so.13 and writes its path; returns its version, such as 130100. Where there is
 * none that fits: writes why and what to do, and returns 0. */
int jaxfp8_cuda_cublaslt(char* text, size_t size);

/* Whether the first call of a product on a device may time candidates to find the fastest (some
 * tens of milliseconds, in memory of its own); it may unless told otherwise. */
void jaxfp8_cuda_allow_timing(int allowed);

/* Keeps what timing found in a file, and takes it from there: from then on, in this process and the
 * next, a product that stands in the file runs with the same algorithm and is not timed. "" or null
 * ends that. Returns 1, or 0 and writes what is wrong. */
int jaxfp8_cuda_set_plan_file(const char* path, char* text, size_t size);

/* What is known of the current device. Needs a GPU: returns 0 and writes why where there is none,
 * else 1. compute_capability is 10 * major + minor. */
int jaxfp8_cuda_device(int* ordinal, int* compute_capability, int* multiprocessors, char* text,
                       size_t size);

#ifdef __cplusplus
}
#endif

#endif /* JAXFP8_CUDA_H_ */
