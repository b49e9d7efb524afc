# find_package(dmattn_kernels) against an installed wheel. It defines
#
#   dmattn_kernels::dmattn       the shared library with its headers, for C and C++
#   dmattn_kernels_VERSION       such as 0.1.0
#
# The header and the library lie at fixed places of the Python package, so this file needs nothing
# from the build and keeps working wherever the package is moved to.
cmake_policy(VERSION 3.24)

get_filename_component(dmattn_kernels_package "${CMAKE_CURRENT_LIST_DIR}/.." REALPATH)
set(dmattn_kernels_library "${dmattn_kernels_package}/libdmattn.so")
set(dmattn_kernels_include "${dmattn_kernels_package}/include")

foreach(part IN ITEMS "${dmattn_kernels_library}" "${dmattn_kernels_include}/dmattn/dmattn.h")
  if(NOT EXISTS "${part}")
    set(dmattn_kernels_FOUND FALSE)
    set(dmattn_kernels_NOT_FOUND_MESSAGE "${part} is missing; install dmattn-kernels again")
    return()
  endif()
endforeach()

if(NOT TARGET dmattn_kernels::dmattn)
  add_library(dmattn_kernels::dmattn SHARED IMPORTED)
  set_target_properties(
    dmattn_kernels::dmattn
    PROPERTIES IMPORTED_LOCATION "${dmattn_kernels_library}"
               IMPORTED_SONAME libdmattn.so
               INTERFACE_INCLUDE_DIRECTORIES "${dmattn_kernels_include}")
endif()

unset(dmattn_kernels_package)
unset(dmattn_kernels_library)
unset(dmattn_kernels_include)
