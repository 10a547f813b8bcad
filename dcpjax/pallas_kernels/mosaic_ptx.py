"""What the kernels for Hopper share where they are written in PTX: constants, addresses, threads, and how tiles lie.

The functions are for code inside of `inline_mgpu`.
"""

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

# A shared tile of 2-byte numbers as products read it: boxes of 8 rows of 128 bytes, swizzled; bytes of a box.
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
BOX = 1024

THREADS = 128  # of a warpgroup
SCALAR = plgpu.Layout.WG_SPLAT(())


def constant32(value: int) -> ir.Value:
    """A constant of 32 bits."""
    return arith.constant(ir.IntegerType.get_signless(32), value)


def constant64(value: int) -> ir.Value:
    """A constant of 64 bits."""
    return arith.constant(ir.IntegerType.get_signless(64), value)


def thread_number() -> ir.Value:
    """Number of this thread in its warpgroup, 32 bits."""
    return arith.remui(utils.thread_idx(), constant32(THREADS))


def address_of(ref: ir.Value) -> ir.Value:
    """Where `ref` begins, 64 bits, for any memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def shared_address(pointer: ir.Value) -> ir.Value:
    """The address in shared memory that a pointer holds, 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)


def shared_place(ref: ir.Value) -> ir.Value:
    """Where `ref` begins in shared memory, 32 bits."""
    return shared_address(utils.memref_ptr(ref))


def ptx(code: str, constraints: str, *args: ir.Value) -> None:
    """PTX without a result, which stays where it is."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(args), code, constraints, has_side_effects=True)
