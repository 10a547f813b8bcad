"""What every test needs before it imports anything that touches JAX: eight CPU devices and a compile cache.

Tests marked `gpu` see the machine's own devices instead, in a run of their own: `pytest -m gpu`. So does any file with
`--on-gpu`, where the attention tests run with every kernel on. `make test-gpu` does both.
"""

import gc
import hashlib
import pathlib
import platform

import hypothesis
import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent

# The same examples in every run. `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("same", derandomize=True, max_examples=50, deadline=None, database=None)
hypothesis.settings.register_profile("explore", max_examples=500, deadline=None)
hypothesis.settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-gpu", action="store_true", help="run on this machine's GPUs, with the kernels for them")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu" and not config.option.on_gpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
    # Compiled code is only good for the processor it was compiled for, and the folder may be on a shared disk.
    cache = ROOT / ".cache" / "jax" / hashlib.sha256(_processor().encode()).hexdigest()[:12]
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


@pytest.fixture(scope="module", autouse=True)
def drop_programs():
    """Compiled programs go when their file is done: a process has room for some thousand of them (each takes several of
    its 65,530 memory maps), and dies when it is full. What is needed again comes from the compile cache."""
    yield
    gc.collect()
    jax.clear_caches()


@pytest.fixture
def data() -> pathlib.Path:
    """Folder of the files that tests read."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="module")
def quick_compile():
    """Tiny programs that run a few times: compiling them well takes longer than it saves.

    The random mixes (engine/test_oracle.py), the collectives and the servers do without, so that what users run is
    tested too.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
