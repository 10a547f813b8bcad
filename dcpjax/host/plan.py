"""What crosses between scheduler and runner: the plan of one step, and what comes back of it."""

import dataclasses
from typing import NamedTuple

import numpy as np

from dcpjax.host.request import Request, TokenLogprobs


class PlannedRow(NamedTuple):
    """One request's part of a step: a chunk of tokens the host knows, or a decode row whose token is on the device.

    One is made for each token of each request: a tuple takes a third of a frozen dataclass's time.

    row: its row slot on the device, 0 … max_num_seqs − 1; constant from admission to release.
    num_tokens: query tokens; in a decode row always 1 + the plan's num_drafts.
    start: position of the first one. Exact in a chunk. In a decode row the most it can be: the device knows the real
        one, which is lower if drafts of a step in flight are rejected, and masks what would pass the request's limit.
    tokens: a chunk's tokens; None in a decode row.
    next_token: the known token right after a chunk, for the chunk's last draft row; −1 if there is none.
    emit: whether a token is sampled: in decode rows, and in the chunk that ends the known tokens.
    new: first chunk since admission: the runner resets the device row. Rows of tokens before `request.matched` are read
        and not written.
    pages: all pages of the request so far, enough for full acceptance; the same object until it grows.
    """

    request: Request
    row: int
    num_tokens: int
    start: int
    tokens: tuple[int, ...] | None
    next_token: int
    emit: bool
    new: bool
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step: decode rows first, then chunks.

    epoch: numbers the dispatched steps: 1, 2, …
    num_drafts: drafts that each decode row verifies, and that each row which emits gets for its next step.
    taken: pages that this plan took from the pool; what they hold is of no request.
    """

    rows: tuple[PlannedRow, ...]
    epoch: int
    num_drafts: int = 0
    taken: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(row.num_tokens for row in self.rows)


@dataclasses.dataclass(frozen=True)
class RowLogprobs:
    """Logprobs of the raw distribution, B rows, k drafts, the n best.

    chosen `[B, k+1]` f32; rank `[B, k+1]` int32, 1: most likely; ids `[B, k+1, n]` int32 and values `[B, k+1, n]` f32,
    best first.
    """

    chosen: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    rank: np.ndarray

    def token(self, i: int, j: int, n: int) -> TokenLogprobs:
        """Of place j in row i, the `n` best; −1: all there are."""
        end = None if n == -1 else n
        # Copied: a view would keep the whole step's arrays for as long as the request lives.
        return TokenLogprobs(
            chosen=float(self.chosen[i, j]),
            rank=int(self.rank[i, j]),
            ids=self.ids[i, j, :end].copy(),
            values=self.values[i, j, :end].copy(),
        )


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step sampled, row i for `plan.rows[i]`; rows after those are padding.

    tokens `[B, k+1]` int32, of which the first `accepted[i]` count; accepted `[B]` int32: 0 in a row that does not emit
    and in one that had reached its limit, else 1 … k+1. drafts `[B, j]` int32: those for the rows' next step; None unless
    a row of the plan has a grammar. prompts: by row with a chunk whose prompt is to be scored, the logprobs of the prompt
    tokens after each of the chunk's, `[1, n]`; None if there is no such row.
    """

    tokens: np.ndarray
    accepted: np.ndarray
    logprobs: RowLogprobs | None = None
    drafts: np.ndarray | None = None
    prompts: dict[int, RowLogprobs] | None = None
