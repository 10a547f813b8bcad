"""The table of all layouts: its figures that do not hang on the machine, and that its arms give the same tokens."""

import json
import math

import jax
import numpy as np
import pytest

from dcpjax import attention
from dcpjax.bench import arms, capacity_rows, draft_ratio, seed_table
from dcpjax.bench.draft_ratio import LAYOUTS, Sizes
from dcpjax.cache import PagedCache, Record, make_pool
from dcpjax.layout import CacheLayout
from dcpjax.mesh import make_plan
from models.config import from_hf
from models.published import GLM_5_2

RATIOS = {2: 1.014, 4: 1.043, 8: 1.101}


@pytest.fixture(scope="module")
def figures(quick_compile):
    return seed_table.measure(quick=True, dcps=(4,))


def test_the_published_model(data):
    assert from_hf(GLM_5_2) == from_hf(json.loads((data / "glm-5.2" / "config.json").read_text()))


def test_tokens_in_35_gib():
    assert capacity_rows.measure(1, "sharded")["bytes_per_token"] == {"allocated": 54_728, "formula": 54_728}
    held = {(dcp, kv): capacity_rows.measure(dcp, kv) for dcp in RATIOS for kv in LAYOUTS}
    for (dcp, draft_kv), found in held.items():
        per_token = found["bytes_per_token"]
        assert per_token["allocated"] == per_token["formula"]
        # One page is the dummy; less than another one is left over.
        left = capacity_rows.DEVICE_BYTES - per_token["allocated"] * (found["kv_tokens"] + capacity_rows.PAGE_TOKENS)
        assert 0 <= left < per_token["allocated"] * capacity_rows.PAGE_TOKENS, (dcp, draft_kv)
    assert round(held[4, "sharded"]["kv_tokens"] / 1e6, 2) == 2.75
    for dcp, ratio in RATIOS.items():
        assert held[dcp, "sharded"]["kv_tokens"] / held[dcp, "replicated"]["kv_tokens"] == pytest.approx(
            ratio, abs=0.003
        )


def test_one_row_for_each_layout(figures, monkeypatch):
    """The whole table around what was measured at one dcp size."""
    toy = {name: figures["toy"][name] for name in ("sizes", "length", "points", "fits")} | {"equal_tokens": True}
    toy |= {"rows": dict.fromkeys((2, 4, 8), figures["toy"]["points"][0])}
    tiny = {"hit_rate": 0.4, "hit_rate_second_round": 0.8, "acceptance_length": 2.5, "equal_rounds": True, "text": ()}
    monkeypatch.setattr(seed_table.draft_ratio, "measure", lambda *args: toy)
    monkeypatch.setattr(seed_table.tiny_rows, "measure", lambda *args: tiny)
    monkeypatch.setattr(seed_table.arms, "forget_programs", lambda: None)
    whole = seed_table.measure(quick=True)
    rows = whole["rows"]
    assert [(row["dcp"], row["draft_kv"]) for row in rows] == [(dcp, kv) for dcp in (2, 4, 8) for kv in LAYOUTS]
    for row in (*rows, *figures["rows"]):
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in seed_table.COLUMNS if name != "draft_kv")
        assert row["draft_kv"] == "sharded" or row["measured_ratio"] == row["predicted_ratio"] == 1
    for dcp, ratio in RATIOS.items():
        assert whole["kv_ratio"][dcp] == pytest.approx(ratio, abs=0.003)
    lines = seed_table.table(rows)
    assert len(lines) == 2 + 6 and lines[4].startswith("| 4 | sharded | 2,746,624 | 0.400 | 2.500 | ")
    json.dumps([whole, figures])


@pytest.mark.parametrize("field", ["acceptance_length", "text", "equal_rounds"])
def test_a_difference_shows(field, figures, monkeypatch):
    """One layout that accepts or says something else, or whose hits change the text."""
    toy = figures["toy"] | {"equal_tokens": True, "rows": {4: figures["toy"]["points"][0]}}
    good = {"hit_rate": 0.4, "hit_rate_second_round": 0.8, "acceptance_length": 2.5, "equal_rounds": True, "text": ()}
    made = [good, good | {field: {"acceptance_length": 2.6, "text": (1,), "equal_rounds": False}[field]}]
    monkeypatch.setattr(seed_table.draft_ratio, "measure", lambda *args: toy)
    monkeypatch.setattr(seed_table.tiny_rows, "measure", lambda *args: made.pop())
    monkeypatch.setattr(seed_table.arms, "forget_programs", lambda: None)
    assert not all(seed_table.measure(quick=True, dcps=(4,))["equal"].values())


def test_layouts_change_no_token(figures):
    assert figures["equal"] == {"toy": True, "tiny": True, "acceptance_length": True}
    assert len({(row["acceptance_length"], row["hit_rate"]) for row in figures["rows"]}) == 1
    first = figures["rows"][0]
    assert first["acceptance_length"] > 1.5 and 0.2 < first["hit_rate"] < first["hit_rate_second_round"] < 1
    # Whatever the toy's target says, its acceptance is the pinned one.
    pin = draft_ratio.QUICK.pin
    assert all(abs(point["tokens_per_step"] - pin) < 0.3 for point in figures["toy"]["points"])


def points(sizes, dcp, x, fixed, tau):
    """Times that the model of a step gives."""
    made = []
    for length in sizes.fitted:
        sharded = fixed + sizes.drafts * tau + x * length * draft_ratio.scans(sizes, dcp, "sharded")
        replicated = fixed + x * length * draft_ratio.scans(sizes, dcp, "replicated")
        times = {"step_seconds": {"sharded": {"median": sharded}}, "measured_ratio": replicated / sharded}
        made.append(times | {"length": length})
    return made


def test_the_fit_finds_what_the_times_were_made_from():
    sizes, dcp, x, fixed, tau = Sizes(layers=3, drafts=5), 4, 2e-7, 0.012, 3e-4
    found = draft_ratio.fit(points(sizes, dcp, x, fixed, tau), sizes, dcp)
    assert found.scan == pytest.approx(x) and found.constant["replicated"] == pytest.approx(fixed)
    assert found.constant["sharded"] == pytest.approx(fixed + 5 * tau)
    # By hand: 3 layers of 6 queries over 4 ranks; 6 + 4 queries of the draft, over 4 ranks or on each.
    sharded, replicated = 3 * 6 / 4 + 10 / 4, 3 * 6 / 4 + 10
    want = (fixed + replicated * x * 8192) / (fixed + 5 * tau + sharded * x * 8192)
    assert found.ratio(8192) == pytest.approx(want)
    assert found.ratio(round(found.length(1.33))) == pytest.approx(1.33, abs=1e-3)
    assert found.length(2.1) == math.inf, "no context is long enough for more than 14.5 / 7"


def test_scans_are_those_of_the_step(monkeypatch, quick_compile):
    """Queries that one decode step scores, counted while it is traced."""
    sizes, seen, real = draft_ratio.QUICK, [], attention.indexer_scores

    def counted(q, *args):
        seen.append(len(q))
        return real(q, *args)

    monkeypatch.setattr(attention, "indexer_scores", counted)
    arm = draft_ratio._arm(sizes, 1, "sharded", 256, 1)
    arms.decode(arm, sizes.tokens)
    k = sizes.drafts
    # The target's layer, the draft's first pass, and one query in the loop of its k − 1 others; the prompt's step alike.
    assert seen == [k + 1, k + 1, 1] * 2
    assert draft_ratio.scans(sizes, 1, "sharded") == sizes.layers * (k + 1) + (k + 1) + (k - 1)


def test_the_same_rows_in_the_same_slots():
    plan, record = make_plan(4, 4), Record(3, np.float32)
    got = []
    for shards in (1, 4):
        layout = CacheLayout(5, 16, shards)
        pool = make_pool(2, layout, record, plan)
        data = np.asarray(arms.filled(PagedCache(pool, pool), 7).latent.data)
        slot = np.arange(layout.num_slots)
        column = layout.owner(slot) * layout.page_rows + layout.row(slot) % layout.page_rows
        got.append(data[:, slot // 16, column])
    assert np.array_equal(*got) and len(np.unique(got[0])) == got[0].size


def test_quartiles():
    assert arms.summary([3.0]) == {"median": 3.0, "quartiles": [3.0, 3.0]}
    assert arms.summary([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "quartiles": [2.0, 4.0]}
    assert jax.default_backend() == arms.machine()["platform"]
