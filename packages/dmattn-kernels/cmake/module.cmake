# The Python module.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
  OUTPUT_VARIABLE pybind11_cmakedir
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
find_package(pybind11 2.13 CONFIG REQUIRED HINTS "${pybind11_cmakedir}")

pybind11_add_module(_core NO_EXTRAS src/bindings/core.cpp)
target_link_libraries(_core PRIVATE dmattn)
target_compile_options(_core PRIVATE -Wall -Wextra)
target_link_options(_core PRIVATE -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL)
install(TARGETS _core DESTINATION dmattn_kernels COMPONENT dmattn_kernels)
