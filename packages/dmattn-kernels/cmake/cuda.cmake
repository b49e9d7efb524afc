# The CUDA compiler, its flags, and the CUTLASS headers. Sets
#   DMATTN_NVCC_FLAGS         for all CUDA sources
#   DMATTN_HOST_MATH          for all host code
#   DMATTN_CODE_NAMES         what the library holds code for
#   DMATTN_GENERAL_GENCODES   for units that are not for one architecture alone
#   DMATTN_GENCODE_<name>     for units of one architecture, such as sm_90a
#   DMATTN_HELPER_GENCODES    for all other sources, and for units whose kernels start early
#   DMATTN_CUTLASS            the folder that holds cute/ and cutlass/
#
# find_package(CUDAToolkit) is not used: it does not know the layout of the compiler from PyPI, and enabling the CUDA
# language brings everything that is needed of the toolkit.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(DMATTN_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(NOT DMATTN_NVCC)
    message(FATAL_ERROR "no nvcc: set CUDACXX to one, or run `pip install \"cuda-toolkit[nvcc,cccl]==13.0.*\"`")
  endif()
  set(CMAKE_CUDA_COMPILER "${DMATTN_NVCC}")
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)

# Each name becomes the virtual architecture that it is compiled from, by which the kernels recognise the tile shapes
# that they should have (src/kernels/attention/sm80/launch.cuh): compute_80 the wide ones; compute_86 the narrow ones,
# for chips with 99 KB of shared memory for a thread block; and compute_89 both. compute_89 is the PTX of a release:
# of the chips that are newer than its machine code, some have more shared memory and some do not.
#
# The code for sm_90 of the helper kernels and of decoding comes from compute_90, which has the instructions for
# starting early (src/kernels/shared/early_start.cuh). The other units would take half as long again to compile with
# it.
#
# Code that only one architecture runs, sm_90a, is for the units of that architecture alone (see units.cmake). It is
# added wherever there is code for Hopper.
if("90" IN_LIST DMATTN_CUDA_ARCHS OR "sm_90" IN_LIST DMATTN_CUDA_ARCHS)
  list(APPEND DMATTN_CUDA_ARCHS "sm_90a")
  list(REMOVE_DUPLICATES DMATTN_CUDA_ARCHS)
endif()
set(DMATTN_CODE_NAMES)
set(DMATTN_GENERAL_GENCODES)
set(DMATTN_HELPER_GENCODES)
set(virtual_codes)
set(helper_codes)
foreach(name IN LISTS DMATTN_CUDA_ARCHS)
  if(name MATCHES "^[0-9]+$")
    set(name "sm_${name}")
  elseif(NOT name MATCHES "^(sm|compute)_[0-9]+$" AND NOT name MATCHES "^sm_[0-9]+a$")
    message(FATAL_ERROR "DMATTN_CUDA_ARCHS holds '${name}'; wanted sm_XX, sm_XXa, XX or compute_XX")
  endif()
  list(APPEND DMATTN_CODE_NAMES "${name}")
  if(name MATCHES "^sm_([0-9]+a)$")
    set(DMATTN_GENCODE_${name} "-gencode=arch=compute_${CMAKE_MATCH_1},code=${name}")
    continue()
  endif()
  if(name MATCHES "^compute_")
    if(NOT name MATCHES "^compute_(80|89)$")
      message(FATAL_ERROR "DMATTN_CUDA_ARCHS holds '${name}'; wanted compute_80 or compute_89 of PTX")
    endif()
    set(virtual "${name}")
  elseif(name MATCHES "^sm_(86|89|12[0-9])$")
    set(virtual compute_86)
  else()
    set(virtual compute_80)
  endif()
  set(helper_virtual "${virtual}")
  if(name STREQUAL "sm_90")
    set(helper_virtual compute_90)
  endif()
  # Codes with the same virtual architecture share one compilation.
  list(APPEND codes_${virtual} "${name}")
  list(APPEND virtual_codes "${virtual}")
  list(APPEND helper_codes_${helper_virtual} "${name}")
  list(APPEND helper_codes "${helper_virtual}")
endforeach()
# Without the general code for a chip, nvcc would compile the other sources for an architecture of its own choice, and
# the library would fail at its first launch.
foreach(name IN LISTS DMATTN_CODE_NAMES)
  string(REGEX REPLACE "^(sm_[0-9]+)a$" "\\1" general "${name}")
  if(NOT general IN_LIST DMATTN_CODE_NAMES)
    message(FATAL_ERROR "DMATTN_CUDA_ARCHS holds '${name}' without '${general}', which all other kernels of that chip "
                        "are compiled for; wanted both")
  endif()
endforeach()
list(REMOVE_DUPLICATES virtual_codes)
foreach(virtual IN LISTS virtual_codes)
  list(JOIN codes_${virtual} "," codes)
  list(APPEND DMATTN_GENERAL_GENCODES "-gencode=arch=${virtual},code=[${codes}]")
endforeach()
list(REMOVE_DUPLICATES helper_codes)
foreach(virtual IN LISTS helper_codes)
  list(JOIN helper_codes_${virtual} "," codes)
  list(APPEND DMATTN_HELPER_GENCODES "-gencode=arch=${virtual},code=[${codes}]")
endforeach()

# Plan and launch compute the same estimated times in host code and must get identical results. They might not if the
# compiler fused multiplications and additions in one of them.
set(DMATTN_HOST_MATH -ffp-contract=off)
set(DMATTN_NVCC_FLAGS -O3 --expt-relaxed-constexpr -Xptxas=-v -Xcompiler=-Wall,-Wextra,${DMATTN_HOST_MATH}
                      # Unused declarations in template branches that an instantiation does not take (CUTLASS and ours).
                      -diag-suppress=177)
if(DMATTN_LINEINFO)
  list(APPEND DMATTN_NVCC_FLAGS -lineinfo)
endif()

set(DMATTN_CUTLASS_INCLUDE "" CACHE PATH "Where cute/ and cutlass/ lie; empty: the PyPI package, fetched if need be")
set(DMATTN_CUTLASS "${DMATTN_CUTLASS_INCLUDE}")
if(NOT DMATTN_CUTLASS)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/find_cutlass.py" "${CMAKE_BINARY_DIR}/cutlass"
    OUTPUT_VARIABLE DMATTN_CUTLASS
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "no CUTLASS headers; set DMATTN_CUTLASS_INCLUDE to the folder that holds cute/ and cutlass/")
  endif()
endif()
message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION}, ${DMATTN_CODE_NAMES}; CUTLASS in ${DMATTN_CUTLASS}")
