"""Which implementation serves each operation: the only place where a platform decides it.

Nothing else asks for the platform, and nothing falls back: a kernel that has not a shape raises `NotImplementedError`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from dcpjax.errors import ConfigError
from dcpjax.pallas_kernels.boxes import has_part as has_box
from dcpjax.pallas_kernels.indexer_scores_triton import has_width
from dcpjax.pallas_kernels.lse_merge_triton import has_part
from dcpjax.pallas_kernels.mosaic_config import WIDTHS as OWN_WIDTHS
from dcpjax.pallas_kernels.sparse_mla_triton import has_widths

CHOICES = {
    "sparse_mla": ("xla", "triton", "mosaic", "interpret"),
    "merge": ("xla", "triton", "mosaic", "interpret"),
    "indexer": ("xla", "triton", "mosaic", "interpret"),
    "topk": ("xla", "triton", "interpret"),
    "experts": ("xla", "triton", "interpret"),
    "projections": ("xla", "triton", "interpret"),
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """An implementation for each operation: "xla" everywhere, "triton" on GPUs, "mosaic" on Hopper, "interpret" for tests.

    sparse_mla: attention over selected rows; "mosaic" is for Hopper, where it is ahead of "triton", which serves the rest.
    merge: the sum of ranks' parts after an all-to-all, or, "mosaic", of few tokens on two ranks in its place. indexer,
    topk: scores and selection. experts: routed experts. projections: dense products with quantised matrices. invariant:
    lists are split at fixed places, and no kernel or movement of attention is chosen by the number of tokens, so that the
    bits of a token's attention do not depend on the tokens beside it. Raises `ConfigError` for other names.
    """

    sparse_mla: str = "xla"
    merge: str = "xla"
    indexer: str = "xla"
    topk: str = "xla"
    experts: str = "xla"
    projections: str = "xla"
    invariant: bool = False

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"kernels: {name} {getattr(self, name)!r} is not known; use one of {', '.join(allowed)}"
                )
        if not isinstance(self.invariant, bool):
            raise ConfigError(f"kernels: invariant {self.invariant!r} must be true or false")

    @classmethod
    def for_platform(
        cls, platform: str, dtype: Any, kv_rank: int, rope_dim: int, index_dim: int, packed: bool = False,
        hopper: bool = False, peers: bool = False,
    ) -> "Kernels":  # fmt: skip
        """What measured best: kernels on NVIDIA GPUs in bfloat16, for rows whose widths the kernel has, or `packed` ones.
        hopper: the GPUs are of that kind, for which there are kernels of their own. peers: they reach each other's memory.

        Float32 is for checks, where XLA's full products are what others are checked against.
        """
        if platform not in ("gpu", "cuda") or dtype != jnp.bfloat16:
            return cls()
        best = "mosaic" if hopper else "triton"
        attention = best if (kv_rank, rope_dim) == OWN_WIDTHS else "triton"
        merge = "mosaic" if hopper and peers and has_box(kv_rank) else "triton"
        return cls(
            sparse_mla=attention if has_widths(kv_rank, rope_dim, packed) else "xla",
            merge=merge if has_part(kv_rank) else "xla",
            indexer=best if has_width(index_dim, packed) else "xla",
            topk="triton",
            # By tokens and widths, which differ from step to step: see `fitting` there.
            experts="triton",
            projections="triton",
        )

    @classmethod
    def chosen(cls, choices: str | Mapping[str, Any] | None, *where: Any) -> "Kernels":
        """A user's choice: None and "auto" are what `for_platform(*where)` says, "xla" is XLA for all, and a mapping changes
        "auto" by name. Raises `ConfigError`."""
        if choices == "xla":
            return cls()
        if choices in (None, "auto"):
            return cls.for_platform(*where)
        if not isinstance(choices, Mapping):
            raise ConfigError(
                f"kernels: give 'auto', 'xla', or a mapping of {', '.join(CHOICES)}; got {choices!r:.100}"
            )
        return cls.for_platform(*where).replaced(choices)._served(*where)

    def replaced(self, choices: Mapping[str, Any] | None) -> "Kernels":
        """With the user's choices by name. Raises `ConfigError`."""
        choices = dict(choices or {})
        known = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(choices.keys() - set(known))
        if unknown:
            raise ConfigError(f"kernels: {', '.join(map(str, unknown))} not known; the names are {', '.join(known)}")
        return dataclasses.replace(self, **choices)

    def _served(
        self, platform: str, dtype: Any, kv_rank: int, rope_dim: int, index_dim: int, packed: bool = False,
        hopper: bool = False, peers: bool = False,
    ) -> "Kernels":  # fmt: skip
        """Itself, if there are kernels for all of it: one that is missing would show when the first step is traced, with all
        weights loaded. Raises `ConfigError`."""
        for name in CHOICES:
            asked = getattr(self, name)
            if asked in ("triton", "mosaic") and platform not in ("gpu", "cuda"):
                raise ConfigError(
                    f"kernels: {name} {asked!r} runs on NVIDIA GPUs, these devices are {platform}; use 'xla'"
                )
        if self.sparse_mla == "mosaic" and not (hopper and (kv_rank, rope_dim) == OWN_WIDTHS):
            raise ConfigError(
                "kernels: sparse_mla 'mosaic' runs on Hopper GPUs, for rows of {} and {} values; use 'triton'".format(
                    *OWN_WIDTHS
                )
            )
        if self.merge == "mosaic" and not (hopper and has_box(kv_rank)):
            raise ConfigError(
                "kernels: merge 'mosaic' runs on Hopper GPUs, for parts of 128, 256 and multiples of 512 values; use 'triton'"
            )
        if self.merge == "mosaic" and not peers:
            raise ConfigError(
                "kernels: merge 'mosaic' writes to the memory of other GPUs, which these do not reach, or not from one process; "
                "use 'triton'"
            )
        if self.indexer == "mosaic" and not hopper:
            raise ConfigError("kernels: indexer 'mosaic' runs on Hopper GPUs, which these are not; use 'triton'")
        stored = "packed " if packed else ""
        for name, rows, serves in (
            ("sparse_mla", f"{stored}rows of {kv_rank} and {rope_dim} values", has_widths(kv_rank, rope_dim, packed)),
            ("indexer", f"{stored}keys of {index_dim} values", has_width(index_dim, packed)),
            ("merge", f"parts of {kv_rank} values", has_part(kv_rank)),
        ):
            if getattr(self, name) != "xla" and not serves:
                raise ConfigError(f"kernels: {name} {getattr(self, name)!r} does not serve {rows}; use 'xla'")
        return self

    def describe(self) -> str:
        """One line for a log."""
        line = ", ".join(f"{name} {getattr(self, name)}" for name in CHOICES)
        return line + ("; sparse_mla splits at fixed places" if self.invariant else "")
