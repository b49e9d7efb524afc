# The shared library: host code, helper kernels, and the units of cmake/units.cmake.
include("${CMAKE_CURRENT_LIST_DIR}/cuda.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/units.cmake")

set(root "${CMAKE_CURRENT_SOURCE_DIR}")
file(GLOB_RECURSE host_sources CONFIGURE_DEPENDS "${root}/src/api/*.cpp" "${root}/src/host/*.cpp")
file(GLOB_RECURSE helper_sources CONFIGURE_DEPENDS "${root}/src/kernels/*.cu")
file(GLOB_RECURSE hashed_sources CONFIGURE_DEPENDS "${root}/include/*" "${root}/src/api/*"
     "${root}/src/host/*" "${root}/src/kernels/*" "${root}/cmake/*.cmake" "${root}/cmake/*.in" "${root}/cmake/*.txt")

# A header with the hash of the sources and the architectures, which is written again when any source changes.
set(build_info "${CMAKE_BINARY_DIR}/generated/build_info.h")
list(JOIN DMATTN_CODE_NAMES "," architectures)
add_custom_command(
  OUTPUT "${build_info}"
  COMMAND "${Python_EXECUTABLE}" "${root}/cmake/write_build_info.py" "${build_info}" --version "${PROJECT_VERSION}"
          --architectures "${architectures}"
  DEPENDS ${hashed_sources} "${root}/CMakeLists.txt" "${root}/cmake/write_build_info.py" "${root}/cmake/source_hash.py"
  VERBATIM)

# One list of exported names. The linker exports these alone, and the tests compare the library with the list.
file(STRINGS "${root}/cmake/exported_symbols.txt" exported_symbols REGEX "^dmattn_")
list(TRANSFORM exported_symbols REPLACE "(.+)" "    \\1;")
string(REPLACE ";;" ";\n" symbol_lines "${exported_symbols}")
set(version_script "${CMAKE_BINARY_DIR}/generated/libdmattn.version")
file(CONFIGURE OUTPUT "${version_script}" CONTENT "{\n  global:\n@symbol_lines@\n  local: *;\n};\n" @ONLY)

set_source_files_properties(${helper_sources} PROPERTIES COMPILE_OPTIONS "${DMATTN_HELPER_GENCODES}")
add_library(dmattn SHARED ${host_sources} ${helper_sources} ${DMATTN_UNIT_SOURCES} "${build_info}")
target_include_directories(dmattn PUBLIC "${root}/include" PRIVATE "${root}/src" "${CMAKE_BINARY_DIR}/generated")
target_include_directories(dmattn SYSTEM PRIVATE "${DMATTN_CUTLASS}" ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_compile_definitions(dmattn PRIVATE $<$<BOOL:${DMATTN_ALL_TILES}>:DMATTN_ALL_TILES>)
target_compile_options(dmattn PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;${DMATTN_HOST_MATH}>"
                                      "$<$<COMPILE_LANGUAGE:CUDA>:${DMATTN_NVCC_FLAGS}>")
target_link_options(dmattn PRIVATE "LINKER:--version-script=${version_script}" LINKER:--exclude-libs,ALL
                    LINKER:--no-undefined -static-libstdc++ -static-libgcc)
set_target_properties(
  dmattn
  PROPERTIES CXX_VISIBILITY_PRESET hidden
             CUDA_VISIBILITY_PRESET hidden
             VISIBILITY_INLINES_HIDDEN ON
             CUDA_STANDARD 17
             CUDA_STANDARD_REQUIRED ON
             CUDA_RUNTIME_LIBRARY Static
             CUDA_ARCHITECTURES OFF
             LINK_DEPENDS "${version_script}"
             # Keeps the registers and spills that ptxas reports in a log beside each object.
             CUDA_COMPILER_LAUNCHER "${Python_EXECUTABLE};${root}/cmake/compile_with_log.py")

# Merges these logs into one file, which is installed, and which the tests read.
set(kernel_resources "${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/kernel_resources.json")
add_custom_command(
  TARGET dmattn POST_BUILD
  COMMAND "${Python_EXECUTABLE}" "${root}/cmake/merge_logs.py" "${CMAKE_BINARY_DIR}/CMakeFiles/dmattn.dir"
          "${kernel_resources}"
  VERBATIM)
install(TARGETS dmattn DESTINATION dmattn_kernels COMPONENT dmattn_kernels)
install(FILES "${kernel_resources}" DESTINATION dmattn_kernels COMPONENT dmattn_kernels)
