"""Seeds of requests: from the user's number, or drawn for who brings none."""

import hashlib


def draw(engine_seed: int, number: int) -> int:
    """The uint32 seed of prompt `number`: the same on every host process."""
    return int.from_bytes(hashlib.sha256(f"{engine_seed}:{number}".encode()).digest()[:4])


def fold(seed: int) -> int:
    """An int64 as uint32; small ones stay as they are."""
    seed = int(seed) % 2**64
    return (seed ^ (seed >> 32)) % 2**32
