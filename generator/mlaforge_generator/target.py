"""What the planner knows of a GPU: limits from the programming guide, rates measured on the machine named."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class EnergyModel:
    """What operations take of energy; `mlaforge bench SPEC --energy` measures it on another GPU.

    Each operation runs alone for 1.6 s on random data, heated before. Energy is NVML's total energy counter less the
    static watts, divided by the operations of that time. Clock and voltage move with the load, so the constants rank
    designs and are not good to two digits.
    """

    static_watts: float
    """Of a chip that is awake: one warp asleep on it keeps the clocks up."""
    power_cap_watts: float
    """Where the clock is lowered, averaged over seconds."""
    hbm_to_smem_nj: float
    """1,152 B (a token of 576 elements) from HBM to the shared memory of one SM."""
    l2_to_smem_nj: float
    """1,152 B from L2, which is what each further SM costs that reads the same."""
    wgmma_nj: tuple[tuple[int, float], ...]
    """By N: a product m64nNk16 of bf16, both operands in shared memory."""

    def matrix_nj(self, n: float) -> float:
        """Energy of one m64nNk16, straight lines between the N measured and beyond them."""
        points = self.wgmma_nj
        (n0, e0), (n1, e1) = next((pair for pair in pairwise(points) if n <= pair[1][0]), (points[-2], points[-1]))
        return e0 + (e1 - e0) * (n - n0) / (n1 - n0)


@dataclass(frozen=True)
class Target:
    """One GPU. Rates are ceilings measured with read streams and matrix products, not datasheet figures."""

    arch: str
    name: str
    sms: int
    smem_per_block: int
    """Bytes of shared memory that a block can have."""
    registers_per_sm: int
    max_registers_per_thread: int
    read_bandwidth: float
    """Bytes per second of a read-only stream larger than L2."""
    copy_bandwidth: float
    """Bytes per second of a copy larger than L2, what is read and what is written together."""
    matrix_rate: float
    """bf16 FLOP per second of a large matrix product on random data."""
    memory: int
    """Bytes of device memory."""
    energy: EnergyModel


H200 = Target(
    arch="sm_90a",
    name="NVIDIA H200",
    sms=132,
    smem_per_block=232_448,
    registers_per_sm=65_536,
    max_registers_per_thread=255,
    read_bandwidth=4.58e12,
    copy_bandwidth=4.30e12,
    matrix_rate=792e12,
    memory=141_000_000_000,
    # Driver 580.159, CUDA 13.0, 2026-11-29. At 105 nJ HBM gives 4.09 G tokens/s at 559 W, so that reading alone stays
    # below the cap; products of N >= 64 reach it by themselves (1710 to 1800 of 1980 MHz).
    energy=EnergyModel(
        static_watts=130.0,
        power_cap_watts=700.0,
        hbm_to_smem_nj=105.0,
        l2_to_smem_nj=32.0,
        wgmma_nj=((8, 21.0), (16, 35.0), (32, 58.0), (64, 82.0), (128, 176.0), (256, 331.0)),
    ),
)

TARGETS = {H200.arch: H200}
