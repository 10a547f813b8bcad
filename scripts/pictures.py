"""Draws the pictures of `docs/dcp.md` into `docs/pictures`: `python scripts/pictures.py` (or `make pictures`).

Owners come from the layout that the engine uses; the picture of the merge checks its own sum.
"""

import pathlib
import sys

import numpy as np

from dcpjax.explain import explain
from dcpjax.layout import CacheLayout
from dcpjax.picture import FAINT, PAPER, Picture, colour
from dcpjax.server.arguments import parse

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "pictures"
# The command lines behind the pictures that `dcpjax.explain` makes.
EXPLAINED = {
    "plan": ["--model", "glm-5.2", "--tp", "8", "--dcp", "4", "--dtype", "bfloat16", "--kv-cache-dtype", "fp8"],
}
_SIDE, _LEFT = 26, 96


def pictures() -> dict[str, str]:
    """File name → SVG of every picture."""
    found = {f"{name}.svg": explain(parse(flags).llm).svg() for name, flags in EXPLAINED.items()}
    return found | {"turns.svg": turns(), "merge.svg": merge(), "slots.svg": slots()}


def turns() -> str:
    """Who owns the tokens of two pages of 16, for turns of 1, 2 and 4 tokens."""
    picture = Picture("Owners of 32 tokens at dcp 4, with turns of 1, 2 and 4 tokens")
    picture.words(12, 24, "32 tokens, two pages of 16, dcp 4: owner of each token", size=15, bold=True)
    y = 44.0
    for interleave in (1, 2, 4):
        layout = CacheLayout(2, 16, 4, interleave)
        picture.words(12, y + 17, f"turns of {interleave}")
        owners = [layout.owner(slot) for slot in range(32)]
        for page in range(2):
            cells = ((str(rank), colour(rank)) for rank in owners[page * 16 : page * 16 + 16])
            picture.cells(_LEFT + page * (16 * _SIDE + 10), y, _SIDE, cells)
        y += _SIDE + 8
    for page in range(2):
        picture.words(_LEFT + page * (16 * _SIDE + 10) + 8 * _SIDE, y + 8, f"page {page}", middle=True)
    return picture.render()


def merge() -> str:
    """One head's attention of one query over ten selected tokens at dcp 4: each rank's part, and the whole."""
    layout, selected = CacheLayout(2, 16, 4), [1, 2, 4, 5, 6, 9, 14, 17, 18, 25]
    score = np.round(np.random.default_rng(3).normal(size=32) * 1.2, 1)
    value = np.round(np.random.default_rng(4).normal(size=32), 1)

    def part(tokens: list[int]) -> tuple[float, float]:
        """Output and natural-log LSE."""
        if not tokens:
            return 0.0, -np.inf
        mass = np.exp(score[tokens])
        return float(mass @ value[tokens] / mass.sum()), float(np.log(mass.sum()))

    whole, total = part(selected)
    picture = Picture("Parts of four ranks, weighted by their LSE, are the attention over all tokens")
    picture.words(12, 24, "one query, one head, ten selected tokens: each rank attends to its own", size=15, bold=True)
    y, merged = 44.0, 0.0
    for x, head in ((_LEFT, "own selected tokens"), (310, "output"), (390, "LSE"), (460, "weight = exp(LSE − total)")):
        picture.words(x, y + 10, head)
    y += 20
    for rank in range(layout.shards):
        own = [token for token in selected if layout.owner(token) == rank]
        out, lse = part(own)
        weight = float(np.exp(lse - total))
        merged += weight * out
        picture.words(24, y + 17, f"rank {rank}")
        picture.cells(_LEFT, y, _SIDE, ((str(token), colour(rank)) for token in own))
        if not own:
            picture.words(_LEFT, y + 17, "none")
        for x, text in ((310, f"{out:+.3f}"), (390, f"{lse:.3f}" if own else "−∞"), (460, f"{weight:.3f}")):
            picture.words(x, y + 17, text)
        picture.cell(510, y + 4, max(1, 140 * weight), _SIDE - 8, fill=colour(rank))
        y += _SIDE + 6
    assert abs(merged - whole) < 1e-12
    picture.words(24, y + 17, "sum of weight × output")
    picture.words(310, y + 17, f"{merged:+.3f}", bold=True)
    y += _SIDE
    picture.words(24, y + 17, "all ten on one device")
    for x, text in ((310, f"{whole:+.3f}"), (390, f"{total:.3f}")):
        picture.words(x, y + 17, text, bold=True)
    return picture.render()


def slots() -> str:
    """Where rows of target and draft lie."""
    picture = Picture("Slots of target and draft for six tokens")
    picture.words(12, 24, "tokens x0 … x5: the row in each slot, and what it is made of", size=15, bold=True)
    y, wide = 44.0, 74
    layout = CacheLayout(1, 8, 4)
    for name, words in (
        ("slot", [str(slot) for slot in range(6)]),
        ("token", [f"x{slot}" for slot in range(6)]),
        ("target row", [f"x{slot}" for slot in range(6)]),
        ("draft row", ["empty", *(f"x{slot} + h{slot - 1}" for slot in range(1, 6))]),
    ):
        picture.words(12, y + 17, name)
        for slot, word in enumerate(words):
            rows = name.endswith("row") and word != "empty"
            fill = colour(layout.owner(slot)) if rows else FAINT if word == "empty" else PAPER
            picture.cell(_LEFT + slot * wide, y, wide, _SIDE, word, fill)
        y += _SIDE + 6
    picture.words(
        12,
        y + 12,
        "hi: the target's hidden state of token xi. Colours: the owner at dcp 4, the same for both rows of a slot.",
    )
    return picture.render()


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
