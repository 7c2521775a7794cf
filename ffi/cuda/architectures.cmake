# JAXFP8_CUDA_ARCHITECTURES: what to compile for. In this order: what the caller names, CUDAARCHS
# of the environment, the GPUs of this machine, and all that is supported. "all" and "native" are
# names as well. Hopper and Blackwell need the `a` of their family, so it is added.

set(supported 80-real 86-real 89-real 90a-real 100a-real 120-real 80-virtual)

# The GPUs of this machine; empty where there are none.
function(jaxfp8_native_architectures result)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE answer RESULT_VARIABLE failed ERROR_QUIET)
  set(architectures "")
  if(failed STREQUAL "0")
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${answer}")
    string(REPLACE "." "" architectures "${capabilities}")
    list(TRANSFORM architectures APPEND "-real")
    list(REMOVE_DUPLICATES architectures)
  endif()
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()

set(wanted "${JAXFP8_CUDA_ARCHITECTURES}")
if(NOT wanted)
  set(wanted "$ENV{CUDAARCHS}")
endif()
if(NOT wanted OR wanted STREQUAL "native")
  jaxfp8_native_architectures(wanted)
endif()
if(NOT wanted OR wanted MATCHES "^all(-major)?$")
  set(wanted "${supported}")
endif()
list(TRANSFORM wanted REPLACE "^(90|100)(-real|-virtual)?$" "\\1a\\2")
set(JAXFP8_CUDA_ARCHITECTURES "${wanted}")
