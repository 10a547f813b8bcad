"""The choice of kernels: by platform, dtype and widths, then by the user, and told in one line."""

import ctypes
import dataclasses

import jax.numpy as jnp
import pytest

from dcpjax import kernels, mesh
from dcpjax.errors import ConfigError
from dcpjax.kernels import CHOICES, Kernels
from dcpjax.mesh import abstract_plan, make_plan

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
    for kv_rank, merge in ((512, "mosaic"), (64, "triton"), (192, "xla")):
        assert Kernels.for_platform("gpu", jnp.bfloat16, kv_rank, 64, 128, hopper=True, peers=True).merge == merge
    for other in ((*where, False, True), ("gpu", jnp.bfloat16, 64, 64, 128, False, True, True)):
        with pytest.raises(
            ConfigError, match="merge 'mosaic' runs on Hopper GPUs, for parts of 128, 256 and multiples of 512"
        ):
            Kernels.chosen({"merge": "mosaic"}, *other)
    with pytest.raises(
        ConfigError, match="merge 'mosaic' writes to the memory of other GPUs, which these do not reach"
    ):
        Kernels.chosen({"merge": "mosaic"}, *where, True, False)
    assert abstract_plan(platform="cuda").hopper
    assert not abstract_plan(platform="cpu").hopper


class Driver:
    """As CUDA's, of four GPUs that reach those whose numbers are at most two away."""

    def cuDeviceGet(self, device, number):
        device._obj.value = number
        return 0 if number < 4 else 101

    def cuDeviceCanAccessPeer(self, can, one, other):
        can._obj.value = abs(one.value - other.value) <= 2
        return 0


def test_the_driver_is_asked_who_reaches_whom(monkeypatch):
    ask = mesh._reach_each_other.__wrapped__
    monkeypatch.setattr(mesh.ctypes, "CDLL", lambda name: Driver())
    found = {numbers: ask(numbers) for numbers in ((0,), (0, 1, 2), (3, 0), (3, 4))}
    assert found == {(0,): True, (0, 1, 2): True, (3, 0): False, (3, 4): False}
    monkeypatch.setattr(mesh.ctypes, "CDLL", lambda name: ctypes.PyDLL("no such driver"))
    assert not ask((0, 1))
    assert not make_plan(2, 2).peers
    assert abstract_plan(2, 2).peers


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
