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

# Most of the time would be spent on compiling programs that run once. Before a backend starts; an
# `XLA_FLAGS` of one's own, even an empty one, is left alone.
COMPILE_FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
os.environ.setdefault("XLA_FLAGS", COMPILE_FAST)

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
MOST_RESIDENT_BYTES = 1.5e9
PAGE_BYTES = 4096

# Programs that tests run in processes of their own.
collect_ignore = ["mesh/axes_of_eight.py", "mesh/cached_programs.py"]


def pytest_addoption(parser):
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of the cases of a test, and of drawn examples, run one in N, two cases at least; "
        "every value that several cases of a test share remains",
    )
    parser.addoption(
        "--programs",
        type=int,
        default=12,
        metavar="N",
        help="how many random programs with regions to draw; hundreds find what a dozen does not",
    )
    parser.addoption(
        "--mutations",
        type=int,
        default=2000,
        metavar="N",
        help="how many mutated checkpoints to read in each test that does; 100000 takes minutes",
    )


def pytest_configure(config):
    sampling.every_nth = config.getoption("--every")


def pytest_collection_modifyitems(config, items):
    """Leaves out what `--every` does, and stops where that loses a value of a parameter."""
    cases = collections.defaultdict(dict)
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        pairs = [(name, id(value)) for name, value in parameters.items()]
        cases[item.nodeid.partition("[")[0]][item.nodeid] = pairs
    chosen, every = set(), config.getoption("--every")
    for test, own in cases.items():
        names = sampling.chosen(own, every)
        lost = sampling.shared_values(own).difference(*(own[name] for name in names))
        if lost:
            raise pytest.UsageError(f"--every loses values of {sorted(lost)} in {test}")
        chosen |= names
    if every > 1:
        chosen -= {item.nodeid for item in items if item.get_closest_marker("any_jax")}
    left_out = [item for item in items if item.nodeid not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collection_finish():
    """Spares the garbage collector what lives as long as the process: modules and tests."""
    gc.freeze()


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
