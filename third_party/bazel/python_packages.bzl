"""Headers of the Python in PYTHON_BIN_PATH (else python3), its nanobind and its jaxlib."""

_FIND = """
import importlib.util, sysconfig
def folder(package):
    return importlib.util.find_spec(package).submodule_search_locations[0]
print(sysconfig.get_path("include"))
print(folder("nanobind"))
print(folder("jaxlib") + "/include")
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "python_headers",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**", "nanobind/ext/robin_map/include/**"]),
    copts = ["-std=c++17", "-fvisibility=hidden", "-fno-strict-aliasing"],
    defines = ["NDEBUG", "NB_COMPACT_ASSERTIONS"],
    includes = ["nanobind/include", "nanobind/ext/robin_map/include"],
    textual_hdrs = glob(["nanobind/src/*.cpp", "nanobind/src/*.h"]),
    deps = [":python_headers"],
)

cc_library(
    name = "xla_ffi",
    hdrs = glob(["jaxlib/xla/ffi/api/*.h"]),
    includes = ["jaxlib"],
)
"""

def _python_packages_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or ctx.which("python3")
    found = ctx.execute([python, "-c", _FIND])
    if found.return_code != 0:
        fail("{} lacks jaxlib or nanobind: {}".format(python, found.stderr))
    include, nanobind, jaxlib = found.stdout.strip().split("\n")
    ctx.symlink(include, "python")
    ctx.symlink(nanobind, "nanobind")
    ctx.symlink(jaxlib, "jaxlib")
    ctx.file("BUILD", _BUILD)

python_packages = repository_rule(
    implementation = _python_packages_impl,
    environ = ["PYTHON_BIN_PATH"],
    local = True,  # asked again by every server, since pip may have changed the packages
)
