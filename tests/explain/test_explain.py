"""Explanations say what the caches and the compiled programs do: owners, bytes and collectives are compared with them."""

import collections
import dataclasses
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

import dcpjax
from dcpjax import build, explain
from dcpjax.attention import AttentionOptions
from dcpjax.explanation import explain_plan, plan_of
from dcpjax.hub import TINY
from dcpjax.layout import CacheLayout
from dcpjax.picture import COLOURS
from dcpjax.server.arguments import parse
from models.config import read_config
from models.stored import bytes_per_device
from tests.attention import toy
from tests.attention.paged import PAGE, Geometry

ROOT = pathlib.Path(__file__).parent.parent.parent
GLM = "tests/data/glm-5.2"
TINY_FLAGS = ["--dcp", "4", "--block-size", "16", "--spec-tokens", "3"]


def explained(flags: list[str]):
    return explain.explain(parse(flags).llm)


def ready(geometry: Geometry, backend: str = "ag_rs") -> build.Resolved:
    cfg = toy.config("FS", "DM")
    config = build.EngineConfig(
        tensor_parallel_size=geometry.plan.num_devices,
        decode_context_parallel_size=geometry.dcp,
        backend=backend,
        index_shards=geometry.index.shards,
        draft_kv="sharded" if geometry.latent_sharded else "replicated",
        block_size=PAGE,
        num_blocks=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kernels="xla",
    )
    return build.resolve(cfg, config)


def test_owners_token_by_token():
    """Dealt out by hand: four ranks, turns of two, pages of sixteen; the index and the draft are everywhere."""
    replicated = ["--speculative-config", '{"draft_kv":"replicated"}', "--dcp-index-shards", "1"]
    found = explained([*TINY_FLAGS, "--cp-kv-cache-interleave-size", "2", *replicated])
    latent, *others = found.pools
    assert latent.tokens == ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))
    assert [pool.tokens for pool in others] == [(tuple(range(16)),)] * 3
    assert [pool.first_slot for pool in found.pools] == [0, 0, 1, 1]


@pytest.mark.parametrize("interleave", [1, 4])
def test_owners_are_those_of_the_layout(interleave):
    flags = [*TINY_FLAGS, "--cp-kv-cache-interleave-size", str(interleave)]
    layout = CacheLayout(1, 16, 4, interleave)
    for pool in explained(flags).pools:
        places = {token: (rank, row) for rank, rows in enumerate(pool.tokens) for row, token in enumerate(rows)}
        assert places == {token: (layout.owner(token), layout.row(token)) for token in range(16)}


@pytest.mark.parametrize(
    "more", [[], ["--dcp-index-shards", "1"], ["--speculative-config", '{"draft_kv":"replicated"}']]
)
def test_bytes_are_those_that_the_pools_take(more):
    """Pages of the real arrays, by their shardings."""
    flags = [*TINY_FLAGS, *more]
    found, llm = explained(flags), parse(flags).llm
    cfg = read_config(TINY)
    draft_kv = (llm["speculative_config"] or {}).get("draft_kv", "sharded")
    sizes = {
        "decode_context_parallel_size": 4,
        "block_size": 16,
        "index_shards": llm["index_shards"],
        "draft_kv": draft_kv,
    }
    ready = build.resolve(cfg, build.EngineConfig(**sizes, num_blocks=3))
    caches = build.make_caches(cfg, ready.shape, ready.layout, ready.net.plan)
    assert found.bytes_per_token * ready.layout.num_slots == bytes_per_device(caches)


def test_bytes_of_glm():
    """The records that are published for it: 656 and 132 bytes; 78 layers, 21 of them with index keys."""
    found = explained(["--model", GLM, "--tp", "8", "--dcp", "4", "--kv-cache-dtype", "fp8"])
    assert [pool.nbytes for pool in found.pools] == [656, 132, 656, 132]
    assert found.bytes_per_token == (78 * 656 + 21 * 132 + 656 + 132) / 4
    assert "13,682.0" in str(found)


@pytest.mark.parametrize("sharded", [True, False])
def test_of_a_running_engine(sharded):
    """What its pools tell is what it was made from; `tests/plan/test_traffic.py` compares the collectives with programs."""
    geometry = Geometry(4, index_sharded=sharded, num_pages=4)
    runner = toy.runner(toy.config("FS", "DM"), geometry, AttentionOptions())
    made = dataclasses.replace(ready(geometry), net=runner.net)
    assert plan_of(runner) == made
    assert explain_plan(made).pools[1].layout == runner.cache.index.layout
    assert {c.operation for c in explain_plan(made).crossings} >= {"gather of queries", "scatter of parts"}


def test_text():
    text = str(explained(TINY_FLAGS))
    assert "Mesh: 4 devices, tp 1 × dcp 4 (groups × ranks). A page is 16 tokens" in text
    assert "  rank 2     2  6 10 14\n" in text
    assert "target latent, target index, draft latent, draft index: 4 shards" in text
    alone = str(explained([]))
    assert "Collectives: none" in alone and "  any rank   0  1  2" in alone and " 15 …" in alone


def test_picture():
    """One cell for each token on each rank, coloured by its owner, and a sentence for each collective."""
    found = explained(TINY_FLAGS)
    root = ET.fromstring(found.svg())
    space = "{http://www.w3.org/2000/svg}"
    texts = [x.text for x in root.iter(f"{space}text")]
    assert [texts.count(str(token)) for token in range(16)] == [2] * 16  # in the row of tokens, and on its owner
    fills = collections.Counter(x.get("fill") for x in root.iter(f"{space}rect"))
    # Rank 0 has the colour of the bars too.
    assert [fills[fill] for fill in COLOURS[1:4]] == [8, 8, 8]
    assert root.find(f"{space}title").text == "Owners of the tokens of a page, tp 1 × dcp 4"
    assert sum(": " in text and " bytes × " in text for text in texts) == len(found.crossings)
    width, height = float(root.get("width")), float(root.get("height"))
    for x in root.iter(f"{space}rect"):
        assert float(x.get("x", 0)) + float(x.get("width")) <= width
        assert float(x.get("y", 0)) + float(x.get("height")) <= height
    assert found._repr_svg_() == found.svg()


def test_a_wider_page_is_cut_short_and_said_so():
    found = explained(["--dcp", "2", "--block-size", "64"])
    assert "…" in found.svg() and "…" in str(found)
    assert dataclasses.replace(found, crossings=()).svg().count("none") == 1


def test_command_line(tmp_path):
    """In a process of its own, as a user starts it: more devices than these tests have."""
    picture = tmp_path / "plan.svg"
    command = [
        sys.executable,
        "-m",
        "dcpjax.explain",
        "--tp",
        "16",
        "--dcp",
        "8",
        "--spec-tokens",
        "3",
        "--svg",
        str(picture),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tp 2 × dcp 8" in done.stdout and picture.read_text().startswith("<svg ")


def test_what_the_command_line_refuses(capsys, tmp_path):
    assert explain.main(["--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    assert explain.main(["--svg", str(tmp_path / "not" / "there.svg")]) == 2
    assert "there.svg" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        explain.main(["--dcp", "4", "--block-size", "6"])
    assert stop.value.code == 2 and "multiple" in capsys.readouterr().err


def test_public_name():
    assert dcpjax.explain_plan is explain_plan and "explain_plan" in dcpjax.__all__
