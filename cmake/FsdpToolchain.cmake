# Warnings, sanitizers and the compiler cache, for this project's own targets only.
add_library(fsdp_options INTERFACE)
target_compile_options(fsdp_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror>
  "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings>"
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Werror>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-warn-spills,-warn-lmem-usage>)
if(FSDP_SANITIZE)
  # GCC's own advice: with sanitizers, "may be uninitialized" is said of what is not.
  target_compile_options(fsdp_options INTERFACE -fsanitize=${FSDP_SANITIZE} -fno-omit-frame-pointer -g1
                                                -Wno-maybe-uninitialized)
  target_link_options(fsdp_options INTERFACE -fsanitize=${FSDP_SANITIZE})
endif()

find_program(FSDP_CCACHE ccache)
if(FSDP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${FSDP_CCACHE}")
endif()
