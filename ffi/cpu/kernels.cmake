# The CPU library without XLA's handler and what asks for the machine's features, and what each
# kernel file is compiled with: for the library and for its checks (tests/cpu).

set(JAXFP8_CPU_SOURCES
  common/check.cc cpu/abi.cc cpu/abi_route.cc cpu/axes.cc cpu/form.cc cpu/gemm.cc cpu/plan.cc
  cpu/peaks.cc cpu/pool.cc cpu/problem.cc cpu/quantize.cc cpu/ragged.cc cpu/route.cc cpu/run.cc)
list(TRANSFORM JAXFP8_CPU_SOURCES PREPEND "${CMAKE_CURRENT_LIST_DIR}/../")

# Kernels may contract a product and a sum into one operation, and assume that no one reads errno or
# floating-point exceptions; they keep NaN, infinities, signs and the order of sums.
set(JAXFP8_scalar -ffp-contract=fast -fno-math-errno -fno-trapping-math)
# Each file gets what its kernels ask for and no more: the compiler uses all it is given.
set(JAXFP8_avx2 ${JAXFP8_scalar} -mavx2 -mfma -mf16c)
set(JAXFP8_avx512
  ${JAXFP8_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
set(JAXFP8_avx512_vnni ${JAXFP8_avx512} -mavx512vnni)
set(JAXFP8_avx512_vbmi ${JAXFP8_avx512} -mavx512vbmi)
set(JAXFP8_avx512_bf16 ${JAXFP8_avx512_vbmi} -mavx512bf16)
set(JAXFP8_amx ${JAXFP8_avx512_bf16} -mavx512vnni -mamx-tile -mamx-int8 -mamx-bf16)
# Those of AVX-512 and AMX for a machine without: tests/cpu/in_software.h says how.
set(JAXFP8_in_software ${JAXFP8_avx2} -Wno-psabi -Wno-aggressive-loop-optimizations
  -include "${CMAKE_CURRENT_LIST_DIR}/../tests/cpu/in_software.h")

set(JAXFP8_CPU_KERNELS scalar quantize_scalar)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND JAXFP8_CPU_KERNELS
    avx2 avx512 avx512_vbmi avx512_bf16 avx512_vnni amx quantize_avx2 quantize_avx512)
endif()
# An x86 without AVX2 is rare: the portable kernels compile faster there, and run slower.
if("avx2" IN_LIST JAXFP8_CPU_KERNELS)
  list(APPEND JAXFP8_scalar -O1)
endif()
foreach(set scalar avx2 avx512)
  set(JAXFP8_quantize_${set} ${JAXFP8_${set}})
endforeach()

# The source of a kernel file: a header that all instruction sets share, for one of them.
function(jaxfp8_kernel_source kernel result)
  set(header isa/kernels.h)
  if(kernel MATCHES "^quantize_")
    set(header quantize/quantize_loops.h)
  endif()
  string(REGEX REPLACE "^quantize_" "" isa "${kernel}")
  set(source "${CMAKE_CURRENT_BINARY_DIR}/isa/${kernel}.cc")
  string(CONCAT text "#define JAXFP8_ISA ${isa}\n#define JAXFP8_IS_${isa}\n\n"
    "#include \"cpu/kernels/${header}\"\n")
  file(CONFIGURE OUTPUT "${source}" CONTENT "${text}" @ONLY)
  set(${result} "${source}" PARENT_SCOPE)
endfunction()
