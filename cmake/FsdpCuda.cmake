# The CUDA language, for builds with FSDP_WITH_CUDA.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)  # A100, H100 and H200, B200; the PTX covers later ones
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100-real;100-virtual")
endif()
# LibTorch::cudart brings torch's own runtime: with the toolkit's beside it the loader takes the toolkit's.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # CMake 3.25's table for nvcc ends at C++17; nvcc 12 and later take the flag.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
