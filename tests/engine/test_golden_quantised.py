"""`LLM` against the quantised golden checkpoints: the checks of `test_golden`, on meshes that cut their scale blocks."""

import gc

import jax
import pytest

from tests.engine.test_golden import Golden, Row, test_draft, test_generate, test_trace

__all__ = ["test_draft", "test_generate", "test_trace"]

FP8, NVFP4 = "q_fp8_block128", "q_nvfp4_experts"
ROWS = (
    Row(1, 1, 16, False, "sharded", True, "ag_rs", 64, FP8, True),
    Row(2, 1, 8, False, "sharded", True, "ag_rs", 16, FP8, False),
    Row(4, 2, 8, True, "replicated", False, "psum", 64, FP8, True),
    Row(1, 1, 8, False, "sharded", True, "ag_rs", 16, NVFP4, False),
    Row(2, 1, 16, True, "sharded", False, "a2a", 64, NVFP4, True),
    Row(4, 2, 4, False, "sharded", True, "ag_rs", 64, NVFP4, False),
)
# Kernels that read the stored values as they are, on the devices' parts.
KERNELS = {ROWS[1]: {"projections": "interpret"}}


@pytest.fixture(scope="module", params=ROWS, ids=str)
def golden(request, quick_compile):
    golden = Golden(request.param, KERNELS.get(request.param, "auto"))
    yield golden
    del golden.llm
    gc.collect()
    jax.clear_caches()
