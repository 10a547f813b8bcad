"""Selection by the kernels: the oracle's sets, in every way that an index can lie on the ranks."""

import pytest

from dcpjax.attention import AttentionOptions
from dcpjax.kernels import Kernels
from tests.attention.paged import PAGE, Geometry, Queries, World, check, run

LENGTHS = [1, 3, 2 * PAGE, 3 * PAGE + 5, 29]
CASES = {
    "dcp1": (Geometry(), 0),
    "dcp2 interleave 4": (Geometry(2, 4), 1),
    "dcp4, index 1": (Geometry(4, index_sharded=False), 0),
}
OPTIONS = AttentionOptions(movement="queries", kernels=Kernels(indexer="interpret", topk="interpret"))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("geometry, first_slot", CASES.values(), ids=CASES)
def test_kernels_select_what_the_oracle_does(geometry, first_slot):
    """Decode rows of three tokens, which share a read, beside a chunk; padding at the end."""
    world = World.make(LENGTHS, 4)
    tokens = [(r, s) for r, length in enumerate(LENGTHS) for s in range(max(0, length - 3), length)]
    queries = Queries.make(tokens, 16)
    _, chosen, out = run(world, world.pools(geometry), queries, geometry, first_slot=first_slot, options=OPTIONS)
    check(world, queries, chosen, out, first_slot)
