"""Plans of the kernels that only move memory: merge.

They are bound by the memory alone, so a plan decides little more than how many 16-byte loads a thread has in flight. A
warp works by itself: without shared memory and barriers of the block, a thread waits for nothing but its own loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from .kernel_plan import ELEMENTS, KernelPlan, Parameter
from .spec import Spec
from .target import Target

THREADS = 256
"""Of a block: eight warps, which share nothing but their launch."""


@dataclass(frozen=True, kw_only=True)
class MergePlan(KernelPlan):
    """Merges two partial results of attention and their lse."""

    element: str
    loads: int
    """16-byte pieces of each partial result that a lane has in flight."""


def _strides(tensor: str, dims: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(f"{tensor}_stride_{dim}", "long long") for dim in dims)


def plan_merge(spec: Spec, target: Target) -> MergePlan:
    """Plan the merge of partial results; any spec can have it."""
    # 2 x 4 pieces are 32 registers, and one row of 1,024 elements, the longest there is, for each warp.
    loads = 4
    partials = (
        parameter
        for i in "12"
        for parameter in (
            Parameter(f"out{i}", "const void*"),
            *_strides(f"out{i}", "bsh"),
            Parameter(f"lse{i}", "const float*"),
            *_strides(f"lse{i}", "bhs"),
        )
    )
    return MergePlan(
        name="merge",
        what="merges two partial results and their lse",
        template="kernels/merge.cu.j2",
        entry="mla_merge",
        threads=THREADS,
        grid=("ceil(rows / (8 warps x rows of a warp))",),
        parameters=(
            *partials,
            Parameter("out", "void*"),
            *_strides("out", "bsh"),
            Parameter("lse", "float*"),
            *_strides("lse", "bhs"),
            Parameter("rows", "int"),
            Parameter("s_q", "int"),
            Parameter("heads", "int"),
            Parameter("pieces", "int"),
            Parameter("rows_per_warp", "int"),
        ),
        constants={"pieces_per_warp": 32 * loads},
        element=ELEMENTS[spec.cache.dtype],
        loads=loads,
    )
