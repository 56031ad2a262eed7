#!/bin/sh
# Builds jturnip with Bazel, offline, and tries what it built. PYTHON_BIN_PATH names the
# Python to build for (else python3); it needs jax and nanobind.
set -eu
cd "$(dirname "$0")/.."
PYTHON_BIN_PATH=${PYTHON_BIN_PATH:-$(command -v python3)}
export PYTHON_BIN_PATH
bazel build -c opt --jobs="${JOBS:-2}" --symlink_prefix=build/bazel- --experimental_no_product_name_out_symlink \
  --override_repository=rules_cc="$PWD/third_party/bazel/rules_cc" \
  --override_repository=rules_java="$PWD/third_party/bazel/rules_java" \
  //:jturnip //:native_check //:cuda_marks_test
build/bazel-bin/cuda_marks_test
# The launcher Bazel makes looks for a python3 of its own; this runs the same files.
cd build/bazel-bin/native_check.runfiles/jturnip
PYTHONPATH=$PWD "$PYTHON_BIN_PATH" xla_ext/native_check.py
