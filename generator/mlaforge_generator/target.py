"""What the planner knows of a GPU: limits from the programming guide, rates measured on the machine named."""

from __future__ import annotations

from dataclasses import dataclass


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
    matrix_rate: float
    """bf16 FLOP per second of a large matrix product on random data."""
    memory: int
    """Bytes of device memory."""


H200 = Target(
    arch="sm_90a",
    name="NVIDIA H200",
    sms=132,
    smem_per_block=232_448,
    registers_per_sm=65_536,
    max_registers_per_thread=255,
    read_bandwidth=4.58e12,
    matrix_rate=792e12,
    memory=141_000_000_000,
)

TARGETS = {H200.arch: H200}
