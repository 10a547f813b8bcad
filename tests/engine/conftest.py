"""Fixtures of the engine's tests."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compile():
    """Tiny programs that run a few times: compiling them well takes longer than it saves.

    The random mixes (test_oracle.py) do without, so that what users run is tested too.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
