"""What all tests share."""

import collections
import ctypes
import gc
import os
import pathlib

import hypothesis
import jax
import pytest
import sampling

from jaxfp8._call.library import ffi

# Most of the time would be spent on compiling programs that run once. Before a backend starts; an
# `XLA_FLAGS` of one's own, even an empty one, is left alone.
COMPILE_FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
USERS_FLAGS = "XLA_FLAGS" in os.environ
os.environ.setdefault("XLA_FLAGS", COMPILE_FAST)
# Only old versions of XLA know this flag. They then compile four times as fast, and round some
# programs in another place.
OLD_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
os.environ.pop("COLUMNS", None)  # tables are whole

# Several CPU devices, so that meshes can be tested anywhere. Set before a backend starts.
jax.config.update("jax_num_cpu_devices", 4)

# The same examples in every run: a failure is a fact about the change, not about the day.
hypothesis.settings.register_profile(
    "reproducible",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("reproducible")

# Thousands of small programs are compiled, a megabyte each.
MOST_RESIDENT_BYTES = 2e9
PAGE_BYTES = 4096

# Marks of few files.
WANTED = ("same_bits", "cuda_library")

# Programs that tests run in processes of their own.
collect_ignore = ["mesh/many_devices.py", "mesh/cached_programs.py"]
collect_ignore += ["writers/write.py", "writers/served.py"]  # in an environment of their own


def pytest_addoption(parser):
    parser.addoption(
        "--one-case",
        action="store_true",
        help="run one case of each test, and draw a fifth of the random examples",
    )
    parser.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="run one in N of each file's tests",
    )
    parser.addoption(
        "--old-emitters",
        action="store_true",
        help="compile faster on the oldest JAX, and leave out tests marked `same_bits`",
    )
    parser.addoption(
        "--require-cuda-library",
        action="store_true",
        help="stop where tests marked `cuda_library` would be skipped",
    )
    parser.addoption(
        "--programs",
        type=int,
        default=6,
        metavar="N",
        help="how many random programs with regions to draw; hundreds find what a few do not",
    )
    parser.addoption(
        "--mutations",
        type=int,
        default=2000,
        metavar="N",
        help="how many mutated checkpoints to read in each test that does; 100000 takes minutes",
    )


def pytest_configure(config):
    sampling.one_case = config.getoption("--one-case")
    if config.getoption("--old-emitters") and not USERS_FLAGS:
        os.environ["XLA_FLAGS"] = f"{COMPILE_FAST} {OLD_EMITTERS}"


def pytest_ignore_collect(collection_path, config):
    """Passes over files that no mark of `-m "this and that and not gpu"` can choose from.

    Files are imported to be searched, and that is a third of a short run.
    """
    marks = config.option.markexpr.split(" and ")
    if collection_path.name == "gpu":
        return "not gpu" in marks or None
    if collection_path.suffix == ".py":
        text = collection_path.read_text()
        return any(mark in WANTED and mark not in text for mark in marks) or None
    return None


def pytest_collection_modifyitems(config, items):
    skip_without_cuda_library(config, items)
    if config.getoption("--old-emitters"):
        keep(config, items, [item for item in items if not item.get_closest_marker("same_bits")])
    if config.getoption("--one-case"):
        keep_one_case(config, items)
    if config.getoption("--share") > 1:
        keep_share(config, items)


def skip_without_cuda_library(config, items):
    """Skips what needs that library where there is none, or stops where it is required."""
    reason = ffi.why_unavailable("cuda")
    if reason is None:
        return
    if config.getoption("--require-cuda-library"):
        raise pytest.UsageError(f"--require-cuda-library: {reason}")
    skip = pytest.mark.skip(reason="needs the library for GPUs: `make test-cuda` builds it")
    for item in items:
        if item.get_closest_marker("cuda_library"):
            item.add_marker(skip)


def keep_one_case(config, items):
    """Leaves out all cases of a test but one."""
    cases = collections.defaultdict(list)
    for item in items:
        cases[name_of(item)].append(item.nodeid)
    chosen = set(map(sampling.chosen, cases.values()))
    keep(config, items, [item for item in items if item.nodeid in chosen])


def keep_share(config, items):
    """Leaves out a share of each file's tests."""
    tests = collections.defaultdict(set)
    for item in items:
        tests[item.path].add(name_of(item))
    share = config.getoption("--share")
    chosen = set().union(*(sampling.part(names, share) for names in tests.values()))
    keep(config, items, [item for item in items if name_of(item) in chosen])


def name_of(item):
    """The name of a test without its case."""
    return item.nodeid.partition("[")[0]


def keep(config, items, kept):
    """Leaves out all other tests."""
    kept_ids = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept_ids])
    items[:] = kept


def pytest_collection_finish():
    """Makes the garbage collector rare: tracing leaves millions of objects, few in cycles."""
    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)


@pytest.fixture(scope="session")
def mutations(pytestconfig):
    """How many mutated checkpoints a test reads."""
    return pytestconfig.getoption("--mutations")


@pytest.fixture(autouse=True)
def bounded_memory():
    """Forgets compiled programs when a test process has grown large."""
    yield
    resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    if resident > MOST_RESIDENT_BYTES:
        jax.clear_caches()
        getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: None)(0)  # glibc keeps it otherwise
