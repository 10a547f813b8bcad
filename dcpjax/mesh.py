"""The device mesh and the map from logical axes to mesh axes; the only reader of axis sizes.

The mesh is `("tp", "dcp")` with `dcp` minor, so that gathering heads over `dcp` yields them in order. dcp adds no
devices: it deals the tokens of the one latent head out to ranks that would otherwise hold copies of it.
"""

import ctypes
import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dcpjax.errors import ConfigError

ALL = ("tp", "dcp")

# Logical axis → mesh axes. Everything that has no entry is replicated: index heads, the low-rank projections and the
# router among them (expert groups must not move when the mesh changes).
_RULES = {
    "heads": ALL, "group_heads": ("tp",), "vocab": ALL, "width": ALL, "page_rows": ("dcp",), "ranks": ("dcp",),
    "devices": ALL,
}  # fmt: skip
# Routed experts lie whole on a device each (expert parallel), or every device holds its part of each of them.
_EXPERT_RULES = {True: {"experts": ALL, "expert_width": None}, False: {"experts": None, "expert_width": ALL}}


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """A mesh and how logical axes lie on it. Static: hashable, passed to jitted functions as is.

    expert_parallel: the axis "experts" is sharded, over all devices; otherwise "expert_width" is.
    """

    mesh: Mesh | AbstractMesh
    expert_parallel: bool = False

    @property
    def tp(self) -> int:
        """Groups of dcp ranks; all of them hold the same rows."""
        return self.mesh.shape["tp"]

    @property
    def dcp(self) -> int:
        """Ranks that deal the tokens out among themselves."""
        return self.mesh.shape["dcp"]

    @property
    def num_devices(self) -> int:
        """Devices of the mesh, tp × dcp."""
        return self.tp * self.dcp

    @property
    def platform(self) -> str:
        """What they are: "cpu", "gpu" or "cuda"."""
        return self._device.platform

    @property
    def hopper(self) -> bool:
        """Whether they are NVIDIA's Hopper, by their name: kernels for its matrix instructions run on no others."""
        return any(name in self._device.device_kind for name in ("H100", "H200", "H800", "H20", "GH200"))

    @property
    def peers(self) -> bool:
        """Whether each device can write to the memory of all others by its address: GPUs of one process that NVLink or PCIe
        joins. Taken for granted of devices that are not there."""
        if isinstance(self.mesh, AbstractMesh):
            return self.platform == "cuda"
        if self.platform not in ("gpu", "cuda") or jax.process_count() > 1:
            return False
        return _reach_each_other(tuple(device.local_hardware_id for device in self.mesh.devices.flat))

    @property
    def _device(self):
        abstract = isinstance(self.mesh, AbstractMesh)
        return self.mesh.abstract_device if abstract else self.mesh.devices.flat[0]

    def pad(self, n: int, axis: str = "width") -> int:
        """The least size ≥ `n` of a dimension with this logical axis that is dealt out evenly."""
        parts = math.prod(self.mesh.shape[name] for name in self._mesh_axes(axis) or ())
        return -(-n // parts) * parts

    def _mesh_axes(self, axis: str) -> tuple[str, ...] | None:
        return (_RULES | _EXPERT_RULES[self.expert_parallel])[axis]

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Partition of an array whose dimensions carry these logical axes (None: not sharded)."""
        return PartitionSpec(*(self._mesh_axes(axis) if axis else None for axis in axes))

    def sharding(self, *axes: str | None) -> NamedSharding:
        """`spec` on this mesh."""
        return NamedSharding(self.mesh, self.spec(*axes))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Tells the partitioner how `x […]`, of any dtype, lies; with no axes, that every device holds all of it."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*axes))

    def per_device(self, body, in_specs, out_specs):
        """`shard_map` of `body` over the whole mesh."""
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@functools.cache
def _reach_each_other(numbers: tuple[int, ...]) -> bool:
    """Whether the driver says so of all pairs of these GPUs; JAX has no question for it, and joins all that can be."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False

    def reaches(one: int, other: int) -> bool:
        can, devices = ctypes.c_int(0), (ctypes.c_int(), ctypes.c_int())
        failed = any(driver.cuDeviceGet(ctypes.byref(x), n) for x, n in zip(devices, (one, other), strict=True))
        return not failed and not driver.cuDeviceCanAccessPeer(ctypes.byref(can), *devices) and bool(can.value)

    return all(reaches(a, b) for a in numbers for b in numbers if a != b)


@functools.cache
def make_plan(tensor_parallel_size: int | None = None, dcp: int = 1, expert_parallel: bool = False) -> MeshPlan:
    """The mesh of `tensor_parallel_size` devices (default: `dcp` of them), cut into groups of `dcp`.

    Raises `ConfigError` when dcp does not divide the device count or too few devices exist.
    """
    size = _check_sizes(tensor_parallel_size, dcp)
    devices = jax.devices()
    if len(devices) < size:
        raise ConfigError(
            f"tensor parallel size {size} needs {size} devices, but JAX started with {len(devices)}. On CPU, make "
            "the LLM before any other JAX call, or set jax_num_cpu_devices first"
        )
    grid = np.array(devices[:size]).reshape(size // dcp, dcp)
    return MeshPlan(Mesh(grid, ALL, axis_types=(AxisType.Auto, AxisType.Auto)), expert_parallel)


def abstract_plan(
    tensor_parallel_size: int | None = None, dcp: int = 1, expert_parallel: bool = False, platform: str = "cuda"
) -> MeshPlan:
    """`make_plan` for devices that are not there: programs can be traced with it and shapes dealt out, nothing more."""
    size = _check_sizes(tensor_parallel_size, dcp)
    device = AbstractDevice("NVIDIA H200" if platform == "cuda" else platform, None, platform)
    kinds = (AxisType.Auto, AxisType.Auto)
    return MeshPlan(AbstractMesh((size // dcp, dcp), ALL, axis_types=kinds, abstract_device=device), expert_parallel)


def _check_sizes(tensor_parallel_size: int | None, dcp: int) -> int:
    """The number of devices. Raises `ConfigError`."""
    size = dcp if tensor_parallel_size is None else tensor_parallel_size
    if dcp < 1 or size < 1 or size % dcp:
        raise ConfigError(
            f"decode context parallel size {dcp} must divide tensor parallel size {size}: dcp uses the same devices, "
            f"it adds none. Use a dcp size that divides {size}, or a larger tensor parallel size"
        )
    return size
