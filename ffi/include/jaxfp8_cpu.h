/* The C functions of libjaxfp8_cpu, besides its XLA FFI handlers.
 *
 * Strings belong to the library and live as long as the library. All functions may be called from
 * any thread.
 */

#ifndef JAXFP8_CPU_H_
#define JAXFP8_CPU_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the package this library was built for. */
const char* jaxfp8_version(void);

/* The version of the XLA FFI headers this library was built against. */
void jaxfp8_ffi_api_version(int* major, int* minor);

/* The instruction sets found, separated by spaces; "" if only the portable kernels run. */
const char* jaxfp8_cpu_features(void);

/* The kernels compiled in: their number, their names, whether this CPU can run them, and the number
 * of calls computed by each. An index out of range gives "" or 0. */
int jaxfp8_cpu_kernel_count(void);
const char* jaxfp8_cpu_kernel_name(int kernel);
int jaxfp8_cpu_kernel_available(int kernel);
uint64_t jaxfp8_cpu_kernel_calls(int kernel);

struct jaxfp8_scaled_dot_spec; /* jaxfp8/jaxfp8.h */

/* Finds the kernel for a spec on this CPU. If the choice depends on the scales, they are taken to
 * be moderate. Writes to `text`, of `size` bytes, a line for each kernel: its name and, except for
 * the chosen one, ": " and the reason against it. Returns 0, or JAXFP8_INVALID_ARGUMENT with the
 * reason in `text` if no kernel takes the spec. */
int jaxfp8_cpu_route(const struct jaxfp8_scaled_dot_spec* spec, char* text, size_t size);

/* Sets every count of calls to 0. */
void jaxfp8_cpu_reset_counters(void);

/* For benchmarks, the peak rate of the calling thread. Runs a loop of independent products `rounds`
 * times, of the kind "f32" (multiply and add), "bf16" or "int8" (dot products, of tiles if the CPU
 * has them), or "avx2" ("f32" in AVX2). Returns the number of operations, two for each product; 0
 * if the CPU has no such instruction. */
int64_t jaxfp8_cpu_peak_products(const char* kind, int64_t rounds);

/* The same for reading memory, in whole multiples of 256 bytes. Returns a value dependent on all of
 * it. */
uint64_t jaxfp8_cpu_peak_read(const void* data, size_t size);

#ifdef __cplusplus
}
#endif

#endif /* JAXFP8_CPU_H_ */
