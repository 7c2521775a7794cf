/* The C functions of libjaxfp8_cpu beside its XLA FFI handlers.
 *
 * Strings belong to the library and live as long as it. All functions may be called from any
 * thread.
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

/* The instruction sets found, separated by spaces; "" where only the portable kernels run. */
const char* jaxfp8_cpu_features(void);

/* The kernels compiled in: how many, what they are called, whether this CPU can run them, and how
 * many calls each has computed. An index out of range gives "" or 0. */
int jaxfp8_cpu_kernel_count(void);
const char* jaxfp8_cpu_kernel_name(int kernel);
int jaxfp8_cpu_kernel_available(int kernel);
uint64_t jaxfp8_cpu_kernel_calls(int kernel);

struct jaxfp8_scaled_dot_spec; /* jaxfp8/jaxfp8.h */

/* Which kernel computes a spec on this CPU, with moderate scales where it depends on them. Writes
 * to `text`, of `size` bytes, a line for each kernel: its name, and after ": " why it is not taken;
 * the one that is has nothing after its name. Returns 0, or JAXFP8_INVALID_ARGUMENT and in `text`
 * why no kernel takes the spec. */
int jaxfp8_cpu_route(const struct jaxfp8_scaled_dot_spec* spec, char* text, size_t size);

/* Sets every count of calls to 0. */
void jaxfp8_cpu_reset_counters(void);

/* For benchmarks, what the calling thread can do at best. Runs a loop of independent products so
 * many times, of the kind "f32" (multiply and add), "bf16" or "int8" (dot products, of tiles where
 * the CPU has them), or "avx2" ("f32" in AVX2). Returns how many operations that was, two for each
 * product; 0 where the CPU has no such instruction. */
int64_t jaxfp8_cpu_peak_products(const char* kind, int64_t rounds);

/* The same for reading memory: returns a value that depends on all of it, for whole multiples of
 * 256 bytes. */
uint64_t jaxfp8_cpu_peak_read(const void* data, size_t size);

#ifdef __cplusplus
}
#endif

#endif /* JAXFP8_CPU_H_ */
