"""What a block of a kernel that multiplies is made of: shared memory, barriers, tensor maps, warps, registers."""

from __future__ import annotations

from dataclasses import dataclass

from .kernel_plan import ELEMENT_BYTES

SUBTILE_COLUMNS = 64
"""Columns of a subtile: 128 bytes, the longest line that TMA and WGMMA swizzle."""
LINE = SUBTILE_COLUMNS * ELEMENT_BYTES
"""Bytes of a row of a subtile."""
SMEM_ALIGNMENT = 1024
"""An atom of the 128-byte swizzle."""


@dataclass(frozen=True)
class SmemRegion:
    """A piece of a block's shared memory; `alias_of` names the region whose bytes it uses at another time."""

    name: str
    constant: str
    offset: int
    size: int
    what: str
    count: int = 1
    """Equal buffers that it consists of."""
    alias_of: str | None = None


@dataclass(frozen=True)
class SmemMap:
    """The shared memory of a block, bytes."""

    regions: tuple[SmemRegion, ...]
    total: int
    limit: int


@dataclass(frozen=True)
class Mbarrier:
    """A group of equal mbarriers. `bytes` is the most that one phase expects from TMA, 0 if none."""

    name: str
    count: int
    arrivals: int
    bytes: int
    what: str
    offset: int = -1
    """Of the first, from the base of shared memory; -1 until the regions are placed."""


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier, or several with successive ids."""

    constant: str
    id: int
    count: int
    threads: int
    what: str


@dataclass(frozen=True)
class TensorMap:
    """A TMA tensor map that the runtime encodes. Dimensions are innermost first; names are filled at the call."""

    parameter: str
    tensor: str
    dims: tuple[str, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


@dataclass(frozen=True)
class WarpRole:
    """What a group of warps does, and how many registers each of its threads has while it does."""

    name: str
    warps: int
    registers: int
    what: str


@dataclass(frozen=True)
class RegisterLimit:
    """Registers of a thread while its warpgroup plays a role."""

    constant: str
    registers: int


@dataclass(frozen=True)
class RegisterUse:
    """One line of the register estimate of a role."""

    role: str
    what: str
    registers: int
