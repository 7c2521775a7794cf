# How sanitized programs are compiled and run.

# Without false alarms of GCC 12, in its own headers.
set(JAXFP8_WARNINGS -Wall -Wextra -Werror -Wno-restrict -Wno-uninitialized -Wno-maybe-uninitialized)
# AddressSanitizer finds an access through a null pointer, through one that wrapped around, or past
# an object. So UBSan's checks of these are off; those of pointer sums take 30 % of the compile time
# of a kernel file.
set(JAXFP8_MEMORY -Og -g1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
  -fno-sanitize=null,nonnull-attribute,object-size,pointer-overflow,returns-nonnull-attribute,vptr)
set(JAXFP8_RACES -Og -g1 -fsanitize=thread)

# Old sanitizers stumble over addresses that are very random.
find_program(setarch setarch)
if(setarch)
  execute_process(COMMAND ${setarch} --addr-no-randomize true RESULT_VARIABLE refused OUTPUT_QUIET
    ERROR_QUIET)
endif()
if(setarch AND NOT refused)
  set(JAXFP8_PLAINLY ${setarch} --addr-no-randomize)
endif()
