"""What the machine itself can do, and what its operations cost: ceilings and energy by kernels that do nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mlaforge.bench.peers import Run
from mlaforge.bench.power import Meter, Sustained, sustain
from mlaforge.bench.timing import Device, Timed
from mlaforge.launch import Cuda, CudaKernel, LaunchTensor
from mlaforge.manifest import Parameter
from mlaforge.rendered import materialise
from mlaforge.simulator import SimulatedKernel, Simulator

TILE_TOKENS = 64
TOKEN_BYTES = 1152
"""Of the token that energy is given for: 576 elements of 16 bits."""

_RING = 1024  # read_stream.cu, operations.cu
_SMEM = 232_448
_PIECE = 10_240  # copies of about this size stream fastest
_MAX_SLOTS = 32
_PRODUCTS = 16  # of a round of operations.cu, in each of two warpgroups
GEMM_SIZE = 8192

_STREAM = (
    Parameter("data", "const void*"),
    Parameter("order", "const int*"),
    Parameter("sink", "int*"),
    *(Parameter(name, "int") for name in ("tiles", "pieces", "piece_bytes", "slots", "readers", "rounds")),
)
_OPERATIONS = (Parameter("operands", "const void*"), Parameter("sink", "int*"), Parameter("rounds", "int"))
_AWAKE = (Parameter("sink", "int*"), Parameter("rounds", "int"))


def kernel_folder(headers: Path) -> Path:
    """Put our measuring kernels beside the device primitives of a generated folder, where they compile."""
    sources = sorted((Path(__file__).parent / "kernels").glob("*.cu"))
    files = {path.name: path.read_text(encoding="utf-8") for path in (*sources, headers / "primitives.cuh")}
    return materialise("bench", files)


@dataclass(frozen=True)
class StreamShape:
    """How tiles are cut into copies."""

    pieces: int
    """Of a tile."""
    piece_bytes: int
    slots: int
    """Copies in flight in a block."""

    @classmethod
    def of(cls, tile_bytes: int) -> StreamShape:
        """Cut a tile into the fewest equal copies that are small enough; ValueError if it is not whole 16 bytes."""
        for pieces in range(1, tile_bytes // 16 + 1):
            size, rest = divmod(tile_bytes, pieces)
            if rest == 0 and size % 16 == 0 and size <= _PIECE:
                return cls(pieces, size, min((_SMEM - _RING) // size, _MAX_SLOTS))
        raise ValueError(f"a tile of {tile_bytes} B is no multiple of 16 B")


class Machine:
    """Calls that load the machine in one way each, as the timers take them."""

    def __init__(self, backend: Cuda | Simulator, device: torch.device, sms: int, headers: Path, d_qk: int) -> None:
        """Prepare; each kernel is compiled when it is first asked for.

        Args:
            backend: where they run.
            device: the same, for torch.
            sms: its multiprocessors.
            headers: a generated folder, whose device headers they include.
            d_qk: width of the cache; tiles of 64 tokens are streamed.
        """
        self.device, self.sms = device, sms
        self.tile_bytes = TILE_TOKENS * d_qk * 2
        self.shape = StreamShape.of(self.tile_bytes)
        self._folder = kernel_folder(headers)
        self._backend = backend
        self._kernels: dict[str, CudaKernel | SimulatedKernel] = {}

    def _kernel(
        self, file: str, entry: str, parameters: Sequence[Parameter], smem: int
    ) -> CudaKernel | SimulatedKernel:
        if entry not in self._kernels:
            source = self._folder / file
            self._kernels[entry] = self._backend.kernel(source, "sm_90a", entry, 0, parameters, smem)
        return self._kernels[entry]

    def read_stream(self, data: torch.Tensor, *, readers: int = 1, rounds: int = 1, seed: int = 0) -> Run:
        """Read the tiles of a contiguous tensor in random order; gives what was last written, a word of each block.

        Args:
            data: whole tiles; what is left over is not read.
            readers: blocks that read the same tiles at the same time.
            rounds: how often all is read in a call.
            seed: of the order.
        """
        tiles = data.numel() * data.element_size() // self.tile_bytes
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(tiles, generator=generator).to(torch.int32).to(self.device)
        sink = torch.zeros(self.sms, dtype=torch.int32, device=self.device)
        shape, blocks = self.shape, self.sms // readers * readers
        tensors = tuple(LaunchTensor(*each) for each in (("data", data, False), ("order", order, False)))
        tensors = (*tensors, LaunchTensor("sink", sink, True))
        numbers = (tiles, shape.pieces, shape.piece_bytes, shape.slots, readers, rounds)
        addresses = (data.data_ptr(), order.data_ptr(), sink.data_ptr())

        smem = _RING + shape.slots * shape.piece_bytes
        kernel = self._kernel("read_stream.cu", "bench_read_stream", _STREAM, smem)

        def run() -> torch.Tensor:
            kernel.launch(self.device, (blocks, 1, 1), 32, (), (*addresses, *numbers), tensors)
            return sink

        return run

    def products(self, n: int, rounds: int) -> Run:
        """Multiply m64nNk16 in two warpgroups of every SM: `rounds` x 16 products in each."""
        operands = torch.randn(operand_bytes(n) // 2, device=self.device).to(torch.bfloat16)
        sink = torch.zeros(self.sms, dtype=torch.int32, device=self.device)
        tensors = (LaunchTensor("operands", operands, False), LaunchTensor("sink", sink, True))
        kernel = self._kernel("operations.cu", f"bench_wgmma_n{n}", _OPERATIONS, _RING + operand_bytes(n))

        def run() -> torch.Tensor:
            values = (operands.data_ptr(), sink.data_ptr(), rounds)
            kernel.launch(self.device, (self.sms, 1, 1), 256, (), values, tensors)
            return sink

        return run

    def awake(self, rounds: int) -> Run:
        """Sleep on the device."""
        sink = torch.zeros(1, dtype=torch.int32, device=self.device)
        kernel = self._kernel("awake.cu", "bench_awake", _AWAKE, 0)

        def run() -> torch.Tensor:
            values = (sink.data_ptr(), rounds)
            kernel.launch(self.device, (1, 1, 1), 32, (), values, (LaunchTensor("sink", sink, True),))
            return sink

        return run

    def gemm(self) -> Run:
        """Multiply bf16 matrices of 8192 x 8192, random normal."""
        a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)

        def run() -> torch.Tensor:
            return torch.mm(a, b, out=out)

        return run


def operand_bytes(n: int) -> int:
    """Bytes of the operands of operations.cu: A of two warpgroups and B, four subtiles each."""
    return 2 * 4 * 64 * 128 + 4 * n * 128


GEMM_FLOPS = 2 * GEMM_SIZE**3


# ---- Energy ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnergyRow:
    """What one operation takes."""

    name: str
    what: str
    nj: float | None
    """Of one operation, static power left out; None for the static power itself."""
    watts: float
    mhz: float
    per_second: float
    """Operations."""


@dataclass(frozen=True)
class EnergyTable:
    """The constants of the energy model, measured."""

    static_watts: float
    hbm_to_smem_nj: float
    """Per 1,152 B."""
    second_reader_nj: float
    """What a second SM that reads the same bytes at the same time adds, per 1,152 B."""
    l2_to_smem_nj: float
    """Per 1,152 B."""
    wgmma_nj: Mapping[int, float]
    """By N of m64nNk16, bf16, both operands in shared memory."""
    rows: tuple[EnergyRow, ...]


def measure_energy(
    machine: Machine,
    device: Device,
    meter: Meter,
    *,
    seconds: float = 1.6,
    heat: float = 0.4,
    report: Callable[[str], None] = lambda line: None,
) -> EnergyTable:
    """Run each operation alone for seconds and divide the watts above static by its rate."""
    rows: list[EnergyRow] = []
    static = 0.0

    def measure(name: str, what: str, run: Run, operations: float) -> float:
        timed = Timed(run, "launches", run(), run)
        held: Sustained = sustain(device, timed, meter, seconds=seconds, heat=heat)
        assert held.watts is not None and held.mhz is not None
        rate = operations / (held.us * 1e-6)
        nj = 1e9 * (held.watts - static) / rate if rows else None
        rows.append(EnergyRow(name, what, nj, held.watts, held.mhz, rate))
        shown = f"{held.watts:.0f} W" if nj is None else f"{nj:.1f} nJ, {held.watts:.0f} W"
        report(f"  {what}: {shown}, {held.mhz:.0f} MHz")
        return held.watts if nj is None else nj

    static = measure("static", "the chip awake, one warp asleep on it", machine.awake(1000), 1)
    big = torch.empty(2 << 30, dtype=torch.uint8, device=machine.device)
    big.view(torch.int32).random_()
    tokens = big.numel() // machine.tile_bytes * machine.tile_bytes / TOKEN_BYTES
    hbm = measure("hbm", "1,152 B from HBM to shared memory", machine.read_stream(big), tokens)
    both = measure("hbm_2", "the same to two SMs", machine.read_stream(big, readers=2), tokens)
    small = big[:24_000_000]
    held = small.numel() // machine.tile_bytes * machine.tile_bytes / TOKEN_BYTES
    l2 = measure("l2", "1,152 B from L2 to shared memory", machine.read_stream(small, rounds=64), 64 * held)
    wgmma = {}
    for n in (64, 128, 256):
        rounds = 60_000 // n
        count = 2 * machine.sms * _PRODUCTS * rounds
        wgmma[n] = measure(f"wgmma_n{n}", f"wgmma m64n{n}k16 bf16", machine.products(n, rounds), count)
    return EnergyTable(static, hbm, both - hbm, l2, wgmma, tuple(rows))


def energy_json(table: EnergyTable) -> dict[str, object]:
    """Give the table as plain data."""
    return {**dataclasses.asdict(table), "wgmma_nj": {str(n): nj for n, nj in table.wgmma_nj.items()}}


def energy_source(table: EnergyTable, power_cap_watts: float) -> str:
    """Give the constants as they stand in the planner's table of a target."""
    wgmma = ", ".join(f"({n}, {nj:.0f}.0)" for n, nj in sorted(table.wgmma_nj.items()))
    return (
        "EnergyModel(\n"
        f"    static_watts={table.static_watts:.0f}.0,\n"
        f"    power_cap_watts={power_cap_watts:.0f}.0,\n"
        f"    hbm_to_smem_nj={table.hbm_to_smem_nj:.0f}.0,\n"
        f"    l2_to_smem_nj={table.l2_to_smem_nj:.0f}.0,\n"
        f"    wgmma_nj=({wgmma}),\n"
        ")"
    )
