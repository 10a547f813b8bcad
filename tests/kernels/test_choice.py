"""The choice of kernels: by platform, dtype and widths, then by the user, and told in one line."""

import dataclasses

import jax.numpy as jnp
import pytest

from dcpjax import kernels
from dcpjax.errors import ConfigError
from dcpjax.kernels import CHOICES, Kernels
from dcpjax.mesh import abstract_plan

WIDTHS = (512, 64, 128)


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_gpus_get_kernels_in_bfloat16(platform):
    chosen = Kernels.for_platform(platform, jnp.bfloat16, *WIDTHS)
    assert (chosen.sparse_mla, chosen.merge) == ("triton", "triton")
    assert not chosen.invariant


def test_hopper_has_a_kernel_of_its_own():
    """For the model's rows, unless the user has another; elsewhere it is refused."""
    own, where = {"sparse_mla": "mosaic"}, ("gpu", jnp.bfloat16, *WIDTHS, False)
    chosen = Kernels.for_platform(*where, hopper=True)
    assert (chosen.sparse_mla, chosen.indexer, chosen.merge) == ("mosaic", "mosaic", "triton")
    assert Kernels.for_platform("gpu", jnp.bfloat16, 256, 64, 128, hopper=True).sparse_mla == "triton"
    assert Kernels.chosen({"sparse_mla": "triton"}, *where, True).sparse_mla == "triton"
    assert Kernels.chosen(own, *where, True).sparse_mla == "mosaic"
    for other in (where, ("gpu", jnp.bfloat16, 256, 64, 128, False, True)):
        with pytest.raises(ConfigError, match="sparse_mla 'mosaic' runs on Hopper GPUs, for rows of 512 and 64 values"):
            Kernels.chosen(own, *other)
    with pytest.raises(ConfigError, match="indexer 'mosaic' runs on Hopper GPUs, which these are not"):
        Kernels.chosen({"indexer": "mosaic"}, *where)
    assert abstract_plan(platform="cuda").hopper
    assert not abstract_plan(platform="cpu").hopper


@pytest.mark.parametrize("platform, dtype", [("cpu", jnp.bfloat16), ("gpu", jnp.float32), ("tpu", jnp.bfloat16)])
def test_everything_else_gets_xla(platform, dtype):
    assert Kernels.for_platform(platform, dtype, *WIDTHS) == Kernels()
    assert {getattr(Kernels(), name) for name in CHOICES} == {"xla"}


@pytest.mark.parametrize("kv_rank, rope", [(48, 64), (512, 8), (512, 96), (8, 64)])
def test_widths_the_kernel_has_not(kv_rank, rope):
    assert Kernels.for_platform("gpu", jnp.bfloat16, kv_rank, rope, *WIDTHS[2:]).sparse_mla == "xla"


def test_the_user_chooses_last():
    chosen = Kernels.for_platform("gpu", jnp.bfloat16, *WIDTHS).replaced({"sparse_mla": "xla", "invariant": True})
    assert (chosen.sparse_mla, chosen.merge, chosen.invariant) == ("xla", "triton", True)
    assert chosen.replaced(None) == chosen


@pytest.mark.parametrize(
    "choices, what",
    [
        ({"sparse_mla": "cuda"}, "sparse_mla 'cuda' is not known; use one of xla, triton, mosaic, interpret"),
        ({"attention": "xla"}, "attention not known; the names are sparse_mla, merge"),
        ({"invariant": "yes"}, "invariant 'yes' must be true or false"),
    ],
)
def test_errors_say_what_is_allowed(choices, what):
    with pytest.raises(ConfigError, match=what):
        Kernels().replaced(choices)


def test_every_operation_is_told():
    assert set(CHOICES) == {field.name for field in dataclasses.fields(Kernels)} - {"invariant"}
    line = Kernels(topk="triton").describe()
    assert "topk triton" in line
    assert all(name in line for name in kernels.CHOICES)
    assert "fixed places" in Kernels(invariant=True).describe()
