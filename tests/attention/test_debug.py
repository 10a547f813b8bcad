"""What `debug` prints: each device's share of the selection, a line a layer, and nothing without it."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from dcpjax.attention import AttentionOptions
from tests.attention.paged import (
    INDEX_DIM,
    LAYERS,
    PAGE,
    WIDTH,
    Geometry,
    Queries,
    World,
    _layer,
    batch_of,
    run,
    same_bits,
    slots_of,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

LINE = re.compile(
    r"attention: layer (\d+) of (\d+), tp (\d), dcp (\d), (\d) shards: (\d+) selected rows here, at most (\d) a token; "
    r"LSE (?:none|(\S+)…(\S+)); q (\[.*\]), rows (\[.*\])"
)


def lines_of(capsys) -> list[re.Match]:
    jax.effects_barrier()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("attention")]
    return [LINE.fullmatch(line) for line in lines]


@pytest.mark.parametrize("movement", ["queries", "rows"])
def test_every_rank_says_what_it_owns(capsys, movement):
    geometry = Geometry(4, 2)
    world = World.make([3 * PAGE, 5], 5)
    queries = Queries.make([(0, 3 * PAGE - 1), (0, 20), (1, 4)], 4)  # and one token of padding
    quiet = AttentionOptions(movement=movement)
    _, _, plain = run(world, world.pools(geometry), queries, geometry, options=quiet)
    assert not lines_of(capsys)
    loud = dataclasses.replace(quiet, debug=True)
    _, chosen, out = run(world, world.pools(geometry), queries, geometry, options=loud)
    assert same_bits(out, plain), "looking changes nothing"
    lines = sorted(lines_of(capsys), key=lambda line: line[4])
    assert [line.group(1, 2, 3, 4, 5) for line in lines] == [("1", str(LAYERS), "0", str(r), "4") for r in range(4)]
    owned = [[s // 2 % 4 for s in slots] for slots in slots_of(chosen)]
    for rank, line in enumerate(lines):
        counts = [owners.count(rank) for owners in owned]
        assert (int(line[6]), int(line[7])) == (sum(counts), max(counts))
        if movement == "rows" or sum(counts):
            assert -100 < float(line[8]) <= float(line[9]) < 100
        else:
            assert line[8] is None
        # Heads are gathered where queries go to the rows.
        assert (line[10], line[11]) == (f"[4, {8 if movement == 'queries' else 2}, {WIDTH}]", "[4, 4]")
    assert sum(int(line[6]) for line in lines) == sum(map(len, owned)) > 0


def test_a_cache_that_is_not_dealt_out_is_whole_on_every_device(capsys):
    geometry = Geometry(2, tp=2, latent_sharded=False, index_sharded=False)
    world = World.make([9], 5)
    options = AttentionOptions(debug=True)
    _, chosen, _ = run(world, world.pools(geometry), Queries.make([(0, 8)], 2), geometry, options=options)
    lines = lines_of(capsys)
    assert sorted(line.group(3, 4) for line in lines) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert {line.group(5, 6) for line in lines} == {("1", str(len(slots_of(chosen)[0])))}


def test_without_debug_nothing_is_compiled():
    geometry, world = Geometry(4), World.make([9], 5)
    queries = Queries.make([(0, 8)], 2)

    def program(options):
        trace = jax.make_jaxpr(_layer, static_argnums=(8, 9, 10))
        zeros = np.zeros((2, WIDTH), np.float32)
        return str(
            trace(
                *world.pools(geometry), zeros, zeros[:, :INDEX_DIM], queries.q, queries.index_q, queries.weight,
                batch_of(world, queries, geometry), 0, options, geometry.plan,
            )
        )  # fmt: skip

    assert "callback" in program(AttentionOptions(debug=True))
    assert "callback" not in program(AttentionOptions())
