"""The shapes that steps are compiled for, and which of them a plan runs in.

Few, since each is a program to compile; padding up to the next one costs less.
"""

import dataclasses
import math

from dcpjax.host.plan import StepPlan
from dcpjax.step import StepShape


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one step may hold: requests, query tokens, tokens of a sequence; what the scheduler plans with."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Shapes that are compiled: decode steps by rows, steps with prompt chunks by tokens (all row slots).

    levels: numbers of drafts that a step may have.
    """

    limits: Limits
    page_tokens: int
    levels: tuple[int, ...] = (0,)

    @property
    def pages(self) -> tuple[int, ...]:
        """Widths of the block tables: that of the longest sequence, and a quarter of it where that saves something."""
        most = -(-self.limits.max_model_len // self.page_tokens)
        return (-(-most // 4), most) if most > 8 else (most,)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of decode steps: padding rows cost less than programs do to compile."""
        return _powers(1, self.limits.max_num_seqs, 16)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of steps with chunks; what follows a hit is short."""
        return _powers(min(64, self.limits.max_num_batched_tokens), self.limits.max_num_batched_tokens, 8)

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """Every shape a plan can need."""
        most, shapes = self.limits.max_num_seqs, set()
        for k in self.levels:
            for pages in self.pages:
                shapes |= {StepShape(t, 1, pages, 0, k) for t in self.tokens}
                shapes |= {StepShape(b * (k + 1), b, pages, k, k) for b in self.rows}
                shapes.add(StepShape(self.tokens[-1], most, pages, k, k))
        return tuple(sorted(shapes))

    def fit(self, plan: StepPlan) -> StepShape:
        """The smallest compiled shape that holds the plan. A single prompt does not pay for the tables of all rows."""
        num_rows, pages = len(plan.rows), max(len(row.pages) for row in plan.rows)
        width, k = next(p for p in self.pages if p >= pages), plan.num_drafts
        if all(row.tokens is None for row in plan.rows):
            rows = next(b for b in self.rows if b >= num_rows)
            return StepShape(rows * (k + 1), rows, width, k, k)
        if num_rows == 1:
            return StepShape(next(t for t in self.tokens if t >= plan.num_tokens), 1, width, 0, k)
        return StepShape(self.tokens[-1], self.limits.max_num_seqs, width, k, k)


def _powers(first: int, last: int, factor: int) -> tuple[int, ...]:
    """first, first·factor, … and last."""
    steps_up = range(math.ceil(math.log(last / first, factor)) if last > first else 0)
    return tuple(sorted({*(first * factor**i for i in steps_up), last}))
