/* The scaled dot for C, C++ and every language with calls to C: libjaxfp8_cpu.so and
 * libjaxfp8_cuda.so.
 *
 *   L   = (lhs - lhs_zero_point) * lhs_scale            each scale and zero point shared by a tile
 *   R   = (rhs - rhs_zero_point) * rhs_scale
 *   y   = activation(sum over contracting axes of L * R  + residual + bias)
 *   amax = max |y|
 *   out = cast(y)                                       float output
 *   out = saturate(round(y / out_scale))                8-bit output
 *
 * A scale common to all terms of a sum multiplies the sum. If it is infinite, the result is an
 * infinity of the sum's sign; the equation, term by term, has NaN there.
 *
 * docs/custom_call.md gives every dtype, shape and rule; the names here are those of the attributes
 * and operands there. Arrays are dense and row-major.
 *
 * Functions return 0 or another JAXFP8_ status. On failure `message`, a buffer of `size` bytes or
 * null, gets the reason, truncated to fit and ended by a 0. The library keeps no pointer. All
 * functions may be called from any thread.
 *
 * Library and caller must be of the same version: `struct_size` is the caller's sizeof the struct,
 * and the library refuses a call with another size than its own.
 */

#ifndef JAXFP8_JAXFP8_H_
#define JAXFP8_JAXFP8_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  JAXFP8_OK = 0,
  JAXFP8_INVALID_ARGUMENT = 1, /* the message names the argument, its value and the need */
  JAXFP8_OUT_OF_MEMORY = 2,
  JAXFP8_FAILED = 3 /* the device or a library failed */
};

/* A list of `rank` sizes or axes. `values` may be null if rank is 0. */
typedef struct jaxfp8_dims {
  size_t rank;
  const int64_t* values;
} jaxfp8_dims;

/* One side of the product. */
typedef struct jaxfp8_operand_spec {
  const char* dtype;       /* "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "float32", ... */
  jaxfp8_dims shape;       /* of the values */
  jaxfp8_dims contracting; /* contracted axes, in the order of the other side's */
  jaxfp8_dims batch;       /* batch axes, in the order of the output's leading axes */
  jaxfp8_dims tiles;       /* for each axis, the size of the tile of one scale */
  int32_t scale;           /* whether it has a scale: float32, of shape ceil(shape / tiles) */
  int32_t zero_point;      /* whether it has a zero point: int32, of the same shape */
  int32_t sums;            /* whether the sums of its values over the contracted axes are given:
                              int32, of the shape with these axes 1 */
  int32_t scale_exponents; /* whether the scale is bytes of float8_e8m0fnu, not float32 */
} jaxfp8_operand_spec;

/* The epilogue, applied to the sum. Shapes have the rank of the output, each axis 1 or full. */
typedef struct jaxfp8_epilogue_spec {
  int32_t has_residual, has_bias, has_out_scale, has_amax;
  jaxfp8_dims residual, bias, out_scale, amax;
  const char* residual_dtype; /* "float32", "bfloat16", "float16"; "" or null without a residual */
  const char* activation;     /* "none", "relu", "gelu_tanh", "gelu_erf", "silu" */
  const char* out_dtype;      /* "float32", "bfloat16", "float16", "int32" or 8 bits */
} jaxfp8_epilogue_spec;

typedef struct jaxfp8_scaled_dot_spec {
  size_t struct_size;
  jaxfp8_operand_spec lhs, rhs;
  jaxfp8_epilogue_spec epilogue;
  const char* precision; /* "default" or "highest" */
  const char* kernel;    /* "" or null: the library chooses; a name forces that kernel */
} jaxfp8_scaled_dot_spec;

/* Data of the operands and results; null if the spec has none. On CUDA these are device
 * pointers, aligned to 16 bytes, the workspace to 256. */
typedef struct jaxfp8_scaled_dot_buffers {
  size_t struct_size;
  const void *lhs, *rhs;
  const void *lhs_scale, *lhs_zero_point, *lhs_sums;
  const void *rhs_scale, *rhs_zero_point, *rhs_sums;
  const void *residual, *bias, *out_scale;
  void *out, *amax;
  void* workspace; /* CUDA only */
  size_t workspace_bytes;
} jaxfp8_scaled_dot_buffers;

/* libjaxfp8_cpu.so: computes on at most `threads` threads, including the caller's (0 counts as 1),
 * and returns when done. */
int jaxfp8_cpu_scaled_dot(const jaxfp8_scaled_dot_spec* spec,
                          const jaxfp8_scaled_dot_buffers* buffers, int threads, char* message,
                          size_t size);

/* libjaxfp8_cuda.so: enqueues on `stream`, a cudaStream_t of the current device, and returns.
 *
 * The first call of a spec on a device makes its plan and may time candidates. Make this call
 * before the stream is captured into a graph, or call `jaxfp8_cuda_prepare`. Each side needs one
 * free and one contracted axis, one of them the last, and at most two batch axes. */
int jaxfp8_cuda_scaled_dot(const jaxfp8_scaled_dot_spec* spec,
                           const jaxfp8_scaled_dot_buffers* buffers, void* stream, char* message,
                           size_t size);

/* Makes the plan of a spec for the current device and a workspace of `workspace_bytes`. */
int jaxfp8_cuda_prepare(const jaxfp8_scaled_dot_spec* spec, size_t workspace_bytes, char* message,
                        size_t size);

/* The most bytes of workspace of use to a spec, or to its named kernel, on a device of a compute
 * capability (10 * major + minor, such as 90), or on any device (0). With less a call may be
 * slower. Needs no GPU. */
int jaxfp8_cuda_workspace(const jaxfp8_scaled_dot_spec* spec, int compute_capability,
                          size_t* workspace_bytes, char* message, size_t size);

/* Finds the kernel for a spec on a device of a compute capability (10 * major + minor, such as 90)
 * with a version of cuBLASLt (such as 130100; 0 for none). Writes a line to `text` for each kernel,
 * best first: its name and, if it cannot compute the spec, ": " and the reason. The first capable
 * kernel is used. The status is JAXFP8_INVALID_ARGUMENT if there is none or the spec is invalid.
 * Needs no GPU. */
int jaxfp8_cuda_route(const jaxfp8_scaled_dot_spec* spec, int compute_capability,
                      int cublaslt_version, char* text, size_t size);

#ifdef __cplusplus
}
#endif

#endif /* JAXFP8_JAXFP8_H_ */
