/* The C functions of libjaxfp8_cpu beside its XLA FFI handler `jaxfp8_scaled_dot`.
 *
 * Strings belong to the library and live as long as it. All functions may be called from any
 * thread.
 */

#ifndef JAXFP8_CPU_H_
#define JAXFP8_CPU_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the package this library was built for. */
const char* jaxfp8_version(void);

/* The version of the XLA FFI headers this library was built against. */
void jaxfp8_ffi_api_version(int* major, int* minor);

/* The instruction sets found, separated by spaces; "" where only the portable kernels run. */
const char* jaxfp8_cpu_features(void);

/* The kernels compiled in: how many, what they are called, whether this CPU can run them, and how
 * many calls each has computed. An index out of range gives "" or 0. */
int jaxfp8_cpu_kernel_count(void);
const char* jaxfp8_cpu_kernel_name(int kernel);
int jaxfp8_cpu_kernel_available(int kernel);
uint64_t jaxfp8_cpu_kernel_calls(int kernel);

/* Sets every count of calls to 0. */
void jaxfp8_cpu_reset_counters(void);

#ifdef __cplusplus
}
#endif

#endif /* JAXFP8_CPU_H_ */
