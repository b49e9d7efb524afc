#!/usr/bin/env bash
# Makes an importable dmattn_kernels from a libdmattn.so that was built elsewhere: compiles the Python module for the
# Python of this machine. Needs g++, the headers of that Python, and pybind11 (installed, or its headers in
# $PYBIND11_INCLUDE); no CUDA.
#
#   tools/build_core_only.sh LIBDMATTN FOLDER [PYTHON]     then: PYTHONPATH=FOLDER python -c 'import dmattn_kernels'
set -euo pipefail
library=$1 folder=$2 python=${3:-python3}
package=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$folder/dmattn_kernels

mkdir -p "$target/include"
cp "$package"/src/dmattn_kernels/{__init__.py,_core.pyi,py.typed} "$target"
cp -r "$package/include/dmattn" "$target/include"
cp "$library" "$target/libdmattn.so"

python_include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
pybind11_include=${PYBIND11_INCLUDE:-$("$python" -c 'import pybind11; print(pybind11.get_include())')}
g++ -O2 -std=c++17 -shared -fPIC -fvisibility=hidden "$package/src/bindings/core.cpp" -o "$target/_core$suffix" \
  -I"$package/include" -I"$python_include" -I"$pybind11_include" -L"$target" -ldmattn -Wl,-rpath,'$ORIGIN'
