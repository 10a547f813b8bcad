"""`LLM` against the golden checkpoints: sets and tokens equal, floats within 2e-4, over meshes, pages and backends.

Each row is one engine and runs all checks. The default rows cover every pair of values of two settings (but `APART`);
`-m matrix` runs the full product of checkpoint, mesh, interleave and page size, with the other settings dealt out in turn.
"""

import gc
import itertools
import pathlib
from typing import NamedTuple

import jax
import numpy as np
import pytest

from dcpjax import LLM, SamplingParams

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden"
ATOL = 2e-4


class Row(NamedTuple):
    dcp: int
    tp: int  # so many times dcp devices
    page: int
    turn: bool  # interleave: page / dcp tokens, else 1
    draft_kv: str
    index_sharded: bool
    backend: str
    chunk: int  # max_num_batched_tokens: cuts the prompt
    case: str  # checkpoint; "b_cfgeps": the latent norms take the config's epsilon
    frozen: bool  # the draft's iterations share a selection

    def __str__(self):
        def word(name, value):
            if isinstance(value, bool):
                return name if value else f"not_{name}"
            return f"{name}{value}" if isinstance(value, int) else value

        return "-".join(word(name, value) for name, value in self._asdict().items())


VALUES = {
    "dcp": (2, 4, 8),
    "tp": (1, 2),
    "page": (4, 8, 16),
    "turn": (False, True),
    "draft_kv": ("sharded", "replicated"),
    "index_sharded": (False, True),
    "backend": ("ag_rs", "a2a", "psum"),
    "chunk": (16, 64),
    "case": ("a_freq4", "b_group2", "b_cfgeps", "c_wide"),
    "frozen": (False, True),
}
MESHES = ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2))  # dcp, tp
# Pairs that are left to the full product, for the sake of few rows.
APART = ({"case", "dcp"}, {"case", "page"}, {"case", "backend"}, {"page", "backend"})

ROWS = (
    Row(1, 1, 16, False, "sharded", True, "ag_rs", 16, "c_wide", True),
    Row(2, 1, 4, True, "sharded", True, "a2a", 64, "c_wide", True),
    Row(2, 2, 8, False, "sharded", True, "ag_rs", 64, "a_freq4", False),
    Row(2, 2, 16, False, "replicated", False, "psum", 16, "c_wide", False),
    Row(4, 1, 16, True, "sharded", True, "psum", 64, "b_group2", False),
    Row(4, 2, 4, False, "replicated", False, "psum", 16, "b_cfgeps", False),
    Row(4, 2, 8, False, "replicated", False, "a2a", 16, "b_group2", True),
    Row(4, 2, 8, True, "replicated", True, "ag_rs", 64, "a_freq4", False),
    Row(8, 1, 8, False, "sharded", True, "psum", 16, "b_cfgeps", True),
    Row(8, 1, 16, True, "replicated", False, "ag_rs", 16, "a_freq4", True),
    Row(8, 1, 16, True, "sharded", False, "a2a", 64, "b_cfgeps", False),
)


def possible(row: Row) -> bool:
    if row.page % row.dcp or row.dcp * row.tp > 8:
        return False
    return not row.turn or row.page > row.dcp  # else a turn is one token anyway


def pairs(row: Row) -> set[tuple]:
    """The pairs of settings that a row tries."""
    return {
        (a, getattr(row, a), b, getattr(row, b)) for a, b in itertools.combinations(VALUES, 2) if {a, b} not in APART
    }


def full_product() -> list[Row]:
    """Every checkpoint on every mesh, interleave and page size; the other settings go round."""
    dealt = ("draft_kv", "index_sharded", "backend", "chunk", "frozen")
    turns = itertools.cycle(itertools.product(*(VALUES[name] for name in dealt)))
    rows = (
        Row(case=case, dcp=dcp, tp=tp, turn=turn, page=page, **dict(zip(dealt, next(turns), strict=True)))
        for case in VALUES["case"]
        for dcp, tp in MESHES
        for turn in VALUES["turn"]
        for page in VALUES["page"]
        if page % dcp == 0 and (not turn or page > dcp > 1)  # else a turn is one token anyway
    )
    return [row for row in rows if row not in ROWS]


def test_rows_cover_every_pair():
    wanted = set().union(*(pairs(row) for row in map(Row._make, itertools.product(*VALUES.values())) if possible(row)))
    assert all(map(possible, ROWS))
    assert wanted - set().union(*map(pairs, ROWS)) == set()
    assert {row.dcp for row in ROWS} == {1, 2, 4, 8}
    assert {(row.case, row.frozen) for row in ROWS} == set(itertools.product(VALUES["case"], VALUES["frozen"]))


class Golden:
    """A checkpoint's recorded outputs and an engine for it."""

    def __init__(self, row: Row, kernels: str | dict[str, str] = "auto"):
        self.row = row
        name, prefix = ("b_group2", "cfgeps_") if row.case == "b_cfgeps" else (row.case, "")
        with np.load(GOLDEN / name / "golden.npz") as arrays:
            self.want = {key.removeprefix(prefix): arrays[key] for key in arrays if key.startswith(prefix)}
            self.ids = arrays["input_ids"].tolist()
        length = len(self.ids) + 24
        overrides = {} if prefix else {"latent_norm_eps": 1e-6}
        if not row.frozen:
            overrides["index_share_for_mtp_iteration"] = False
        self.llm = LLM(
            GOLDEN / name,
            tensor_parallel_size=row.dcp * row.tp,
            decode_context_parallel_size=row.dcp,
            cp_kv_cache_interleave_size=row.page // row.dcp if row.turn else 1,
            dcp_comm_backend=row.backend,
            index_shards=None if row.index_sharded else 1,
            block_size=row.page,
            num_blocks=1 + -(-length // row.page),  # just what the sequence needs
            max_model_len=length,
            max_num_seqs=1,
            max_num_batched_tokens=row.chunk,
            speculative_config={"method": "mtp", "num_speculative_tokens": 0, "draft_kv": row.draft_kv},
            hf_overrides=overrides,
            kernels=kernels,
        )

    def close(self, name: str, got: np.ndarray) -> None:
        want = self.want[name]
        assert got.shape == want.shape and got.dtype == want.dtype, name
        np.testing.assert_allclose(got, want, atol=ATOL, rtol=0, err_msg=name)

    def equal(self, name: str, got: np.ndarray) -> None:
        np.testing.assert_array_equal(got, self.want[name], err_msg=name, strict=True)


@pytest.fixture(
    scope="module",
    params=[*ROWS, *(pytest.param(row, marks=pytest.mark.matrix) for row in full_product())],
    ids=str,
)
def golden(request, quick_compile):
    golden = Golden(request.param)
    yield golden
    del golden.llm
    gc.collect()  # pools and programs of many engines would pile up
    jax.clear_caches()


def test_trace(golden):
    """Target and teacher-forced draft, layer by layer, from the cache."""
    trace = golden.llm.trace(golden.ids, int(golden.want["mtp_input_ids"][-1]))
    golden.close("logits", trace.logits)
    golden.close("hidden_states", trace.hidden_states)
    golden.close("final_hidden", trace.final_hidden)
    golden.close("latent_cache", trace.latent)
    layers = {int(name.removeprefix("topk_layer_")) for name in golden.want if name.startswith("topk_layer_")}
    assert set(trace.topk) == layers
    for layer, positions in trace.topk.items():
        golden.equal(f"topk_layer_{layer}", positions)
    golden.close("mtp_logits", trace.mtp_logits)
    golden.close("mtp_hidden", trace.mtp_hidden)
    golden.close("mtp_hidden_prenorm", trace.mtp_hidden_prenorm)
    golden.equal("mtp_topk", trace.mtp_topk)


def test_generate(golden):
    """24 greedy tokens, up to the last slot of the context and of the pool, and the logits that chose them."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=-1)
    (result,) = golden.llm.generate(golden.ids, params)
    (choice,) = result.outputs
    assert choice.token_ids == golden.want["greedy_tokens"].tolist()
    assert choice.finish_reason == "length" and result.prompt_token_ids == golden.ids
    logits = golden.want["greedy_logits"].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    got = np.full_like(want, np.nan)
    for row, entry in zip(got, choice.logprobs, strict=True):
        assert entry.rank == 1 and entry.chosen == entry.values[0]
        row[entry.ids] = entry.values
    np.testing.assert_allclose(got, want, atol=ATOL, rtol=0)


def test_draft(golden):
    """Five recursive drafts, their iterations frozen or not."""
    draft = golden.llm.draft(golden.ids, 5)
    name = "draft_share" if golden.row.frozen else "draft_own"
    golden.equal(f"{name}_tokens", draft.tokens)
    golden.close(f"{name}_logits", draft.logits)
    golden.close(f"{name}_hidden", draft.hidden)
