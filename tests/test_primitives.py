"""Every device primitive by itself: the same small kernel, on the same input, under the simulator and on an H200.

The kernels lie in primitives/, one file a primitive. Each is compared with what torch makes of its input: bit by bit
where the operation is exact, which products of small integers are, too.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mlaforge.compiler import CompiledKernel, compile_kernel
from mlaforge.launch import Cuda, CudaKernel, LaunchTensor, TensorMapShape
from mlaforge.manifest import Parameter
from mlaforge.simulator import MODES, SimulatedKernel, SimulationError, Simulator, SimulatorOptions

ROOT = Path(__file__).parents[1]
KERNELS = sorted(path.name for path in (ROOT / "tests" / "primitives").glob("*.cu"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@functools.cache
def folder() -> Path:
    """A folder with the kernels and the headers, beside which they have to lie."""
    path = Path(tempfile.mkdtemp(prefix="mlaforge-primitives-"))
    for header in (ROOT / "templates" / "device").glob("*.cuh"):
        shutil.copy(header, path)
    for file in (ROOT / "tests" / "primitives").iterdir():
        shutil.copy(file, path)
    return path


@dataclass(frozen=True)
class Map:
    """A tensor map over a four-dimensional view, and its box; sizes innermost first, as the hardware has them."""

    view: torch.Tensor
    box: tuple[int, int, int, int]


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a view to a device with its strides, and with what lies between its elements."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return flat.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass
class Machine:
    """Where a kernel runs: on a GPU, or simulated."""

    backend: Cuda | Simulator
    device: torch.device
    kernels: dict[str, CudaKernel | SimulatedKernel] = field(default_factory=dict)

    def launch(
        self,
        source: str,
        entry: str,
        *,
        maps: Sequence[Map] = (),
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor],
        scalars: Sequence[int] = (),
        threads: int,
        blocks: int = 1,
        smem: int = 0,
        overlap_previous: bool = False,
    ) -> list[torch.Tensor]:
        """Launch a kernel whose parameters are maps, inputs, outputs and integers, in this order; the outputs.

        Tensors that lie on the device already are used where they are.
        """
        views = [moved(each.view, self.device) for each in maps]
        into = [tensor.to(self.device) for tensor in outputs]
        tensors = [*(moved(tensor, self.device) for tensor in inputs), *into]
        encoded = []
        for each, view in zip(maps, views, strict=True):
            dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[view.dtype]
            shape = TensorMapShape(dtype, tuple(view.shape[::-1]), tuple(view.stride()[-2::-1]), each.box)
            encoded.append(self.backend.encode_tensor_map(shape, view.data_ptr()))
        touched = [LaunchTensor(f"map {i}", view, writable=False) for i, view in enumerate(views)]
        touched += [LaunchTensor(f"tensor {i}", tensor, writable=i >= len(inputs)) for i, tensor in enumerate(tensors)]
        if entry not in self.kernels:
            parameters = [Parameter(f"tensor{i}", "void*") for i in range(len(tensors))]
            parameters += [Parameter(f"scalar{i}", "int") for i in range(len(scalars))]
            self.kernels[entry] = self.backend.kernel(folder() / source, "sm_90a", entry, len(maps), parameters, smem)
        self.kernels[entry].launch(
            self.device,
            (blocks, 1, 1),
            threads,
            encoded,
            [*(tensor.data_ptr() for tensor in tensors), *scalars],
            touched,
            overlap_previous=overlap_previous,
        )
        return into

    def run(self, source: str, entry: str, **arguments: Any) -> list[torch.Tensor]:
        """Launch, and bring the outputs back."""
        return [tensor.cpu() for tensor in self.launch(source, entry, **arguments)]


@pytest.fixture(params=[*MODES, pytest.param("h200", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Machine:
    if request.param == "h200":
        return Machine(Cuda(), torch.device("cuda", 0))
    return Machine(Simulator(SimulatorOptions(seed=1, mode=request.param)), torch.device("cpu"))


def blank(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Room for results, full of what no kernel here writes."""
    return torch.full(shape, -7_777, dtype=dtype)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


# ---- Compiling ------------------------------------------------------------------------------------------------------


@functools.cache
def compiled(source: str) -> CompiledKernel:
    return compile_kernel(folder() / source).with_sass()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("source", KERNELS)
def test_compiles_for_hopper(source: str) -> None:
    kernel = compiled(source)
    assert not kernel.warnings
    for report in kernel.kernels.values():
        assert report.spill_stores == report.spill_loads == report.stack_frame == 0, report.entry


INSTRUCTIONS = {
    "tma_load.cu": {"UTMALDG"},
    "mbarrier.cu": {"SYNCS"},
    "registers.cu": {"USETMAXREG"},
    "wgmma_ss_k.cu": {"HGMMA"},
    "wgmma_mn.cu": {"HGMMA"},
    "stmatrix.cu": {"STSM"},
}


@pytest.mark.parametrize("source", INSTRUCTIONS)
def test_becomes_the_instruction_it_stands_for(source: str) -> None:
    for report in compiled(source).kernels.values():
        assert report.sass is not None
        assert INSTRUCTIONS[source] <= set(report.sass), (report.entry, sorted(report.sass))


# ---- Numbers --------------------------------------------------------------------------------------------------------


def hard_floats() -> torch.Tensor:
    """Numbers of every class, and the borders at which rounding to 16 bits turns."""
    every = numbers(4096).view(torch.float32)
    halfway = torch.arange(0, 0x8000, 7, dtype=torch.int32)
    bf16 = torch.cat([(halfway << 16) + tie for tie in (0x7FFF, 0x8000, 0x8001)]).view(torch.float32)
    fp16_steps = halfway.to(torch.int16).view(torch.float16).float()
    next_steps = (halfway + 1).to(torch.int16).view(torch.float16).float()
    fp16 = (fp16_steps + next_steps) / 2
    fp16 = torch.cat([fp16, fp16.nextafter(fp16 * 2), fp16.nextafter(fp16 * 0)])
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 65_519.0, 65_520.0, -65_520.0, 3.4e38]
    special += [2.0**-24, 2.0**-25, 2.0**-149, 2.0**-126, -(2.0**-133)]
    all_of_them = torch.cat([every, bf16, -bf16, fp16, -fp16, torch.tensor(special)])
    return torch.cat([all_of_them, all_of_them.new_zeros(-len(all_of_them) % 2)])


def test_pack2(machine: Machine) -> None:
    x = hard_floats()
    pairs = len(x) // 2
    (out,) = machine.run(
        "pack2.cu", "pack2_pairs", inputs=[x], outputs=[blank(2 * pairs)], scalars=[pairs], threads=128
    )
    for half, dtype in zip(out.view(torch.int16).view(2, -1), DTYPES.values(), strict=True):
        # NaN of any sign and payload becomes the one of the instruction.
        want = torch.where(x.isnan(), torch.tensor(0x7FFF, dtype=torch.int16), x.to(dtype).view(torch.int16))
        wrong = (half != want).nonzero().flatten()
        assert not len(wrong), (dtype, x[wrong[0]], hex(half[wrong[0]] & 0xFFFF), hex(want[wrong[0]] & 0xFFFF))


def test_approximate_exponential_and_logarithm(machine: Machine) -> None:
    x = torch.cat([torch.linspace(-130, 130, 4001), hard_floats()[:2048], torch.logspace(-37, 37, 999)])
    special = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, 1.0, -1.0, 2.0**-130, -200.0, 128.0, 2.0**100])
    x = torch.cat([x, special])
    (out,) = machine.run(
        "approx.cu",
        "approx",
        inputs=[x],
        outputs=[blank(2 * len(x) + 2, dtype=torch.float32)],
        scalars=[len(x)],
        threads=128,
    )
    exponential, logarithm = out[:-2].view(2, -1)
    tiny = torch.finfo(torch.float32).tiny
    want = x.double().exp2()
    # Below the normal numbers there is only zero, on either side.
    want = torch.where(want < tiny, 0.0, torch.where(want > torch.finfo(torch.float32).max, torch.inf, want))
    torch.testing.assert_close(exponential.double(), want, rtol=2.0**-21, atol=tiny, equal_nan=True)
    flushed = torch.where(x.abs() < tiny, x * 0, x).double()
    torch.testing.assert_close(logarithm.double(), flushed.log2(), rtol=2.0**-22, atol=2.0**-21, equal_nan=True)
    assert exponential[-11] == 0 and exponential[-2] == torch.inf
    assert out[-2] == torch.tensor(2.0).log() and out[-1] == torch.inf


# ---- Threads --------------------------------------------------------------------------------------------------------


def test_shuffles(machine: Machine) -> None:
    x = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(torch.int32) * 1000 - 5
    floats, out = machine.run(
        "shuffles.cu", "shuffles", inputs=[x], outputs=[blank(64, dtype=torch.float32), blank(6, 64)], threads=64
    )
    t = torch.arange(64)
    warp, lane = t // 32 * 32, t % 32
    assert torch.equal(floats, x[t ^ 1].float())
    want = [x[t ^ 5], x[warp], x[warp + (lane * 7 + 3) % 32], x[torch.where(lane < 4, t, t - 4)], lane, t // 32]
    for row, expected in zip(out, want, strict=True):
        assert torch.equal(row, expected.to(torch.int32))


def test_barriers(machine: Machine) -> None:
    rounds = 9
    x = numbers(rounds, 64)
    (out,) = machine.run(
        "barriers.cu",
        "barriers",
        inputs=[x],
        outputs=[blank(64 * rounds + 128)],
        scalars=[rounds],
        threads=128,
        smem=512,
    )
    assert torch.equal(out[: 64 * rounds].view(rounds, 64), x.flip(1))
    t = torch.arange(128, dtype=torch.int32)
    assert torch.equal(out[64 * rounds :], t ^ 127 ^ 31)


def test_setmaxnreg(machine: Machine) -> None:
    x = torch.arange(384, dtype=torch.int32)
    (out,) = machine.run("registers.cu", "registers", inputs=[x], outputs=[blank(384)], threads=384)
    assert torch.equal(out, x + torch.where(x < 128, 1, 2).to(torch.int32))


def test_a_dependent_grid_waits(machine: Machine) -> None:
    blocks = 8
    first = blank(128 * blocks).to(machine.device)
    second = blank(128 * blocks).to(machine.device)
    arguments: dict[str, Any] = {"inputs": [first], "outputs": [second], "threads": 128, "blocks": blocks}
    # Both kernels are loaded before they count, so that nothing comes between them.
    machine.launch("grid_dependency.cu", "second_kernel", **arguments)
    x = numbers(128 * blocks).to(machine.device)
    for steps in (1, 200):
        machine.launch(
            "grid_dependency.cu",
            "first_kernel",
            inputs=[x],
            outputs=[first],
            scalars=[steps],
            threads=128,
            blocks=blocks,
        )
        machine.launch("grid_dependency.cu", "second_kernel", **arguments, overlap_previous=True)
    i, want = torch.arange(128 * blocks), x.cpu().long()
    for step in range(steps):
        want = (want * 5 + x.cpu()[(i + step) % 128]) % 2**32
    assert torch.equal(second.cpu(), (want + 1).to(torch.int32))


# ---- Memory ---------------------------------------------------------------------------------------------------------


def test_loads_and_stores(machine: Machine) -> None:
    floats = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    ints = numbers(64, 4)
    out_floats, out_ints = machine.run(
        "memory.cu",
        "memory",
        inputs=[floats, ints],
        outputs=[blank(256 + 128, dtype=torch.float32), blank(512 + 384)],
        threads=64,
        smem=2048,
    )
    assert torch.equal(out_floats[:256].view(64, 4), floats.flip(1))
    assert torch.equal(out_ints[:512].view(64, 8), ints[:, [3, 2, 1, 0, 1, 0, 2, 3]])
    assert torch.equal(out_floats[256:].view(64, 2), floats.flip(0)[:, :2])
    zeros = torch.zeros(64, 4, dtype=torch.int32)
    assert torch.equal(out_ints[512:].view(64, 6), torch.cat([ints.flip(0)[:, :2], zeros], 1))


def test_stmatrix(machine: Machine) -> None:
    registers = numbers(2, 32, 4)
    rows = torch.randperm(64, generator=torch.Generator().manual_seed(1)).to(torch.int32).view(2, 32)
    (out,) = machine.run(
        "stmatrix.cu", "stmatrix", inputs=[registers, rows], outputs=[blank(64, 4)], threads=64, smem=1024
    )
    want = blank(64, 4)
    for warp in range(2):
        for matrix in range(4):
            for row in range(8):
                # A row's four pairs of columns are in four lanes, its address in a lane of its own.
                want[rows[warp, 8 * matrix + row]] = registers[warp, 4 * row : 4 * row + 4, matrix]
    assert torch.equal(out, want)


# ---- mbarriers and TMA ----------------------------------------------------------------------------------------------


def test_mbarriers(machine: Machine) -> None:
    rounds = 11
    x = numbers(rounds, 96)
    (out,) = machine.run(
        "mbarrier.cu", "mbarrier", inputs=[x], outputs=[blank(rounds, 96)], scalars=[rounds], threads=128, smem=1024
    )
    assert torch.equal(out, x.flip(1))


def box_of(view: torch.Tensor, corner: Sequence[int], box: Sequence[int]) -> torch.Tensor:
    """What a copy brings, row by row: the box at `corner`, both innermost first, zeros outside of the tensor."""
    result = torch.zeros(tuple(reversed(box)), dtype=view.dtype)
    inside, target = [], []
    for first, length, size in zip(reversed(corner), reversed(box), view.shape, strict=True):
        begin, end = max(first, 0), min(first + length, size)
        if begin >= end:
            return result.view(-1, box[0])
        inside.append(slice(begin, end))
        target.append(slice(begin - first, end - first))
    result[tuple(target)] = view[tuple(inside)]
    return result.view(-1, box[0])


def swizzled(rows: torch.Tensor) -> torch.Tensor:
    """Lay rows of 128 bytes as the 128-byte swizzle does."""
    chunks = rows.view(torch.int16).view(-1, 8, 8)
    row, chunk = torch.meshgrid(torch.arange(len(chunks)), torch.arange(8), indexing="ij")
    result = torch.empty_like(chunks)
    result[row, chunk ^ row % 8] = chunks
    return result.view(-1, 64)


def sequence_16_bit(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return numbers(*shape).to(torch.int16).view(dtype)


VIEWS = {
    "dense": lambda: sequence_16_bit(3, 5, 24, 192),
    "cut out of a larger one": lambda: sequence_16_bit(4, 6, 40, 256)[1:, 1:, 8:32, 64:],
    "dimensions in another order": lambda: sequence_16_bit(24, 3, 5, 136).permute(1, 2, 0, 3),
    "a row that repeats": lambda: sequence_16_bit(3, 1, 24, 80, dtype=torch.float16).expand(-1, 5, -1, -1),
    "small": lambda: sequence_16_bit(1, 1, 1, 8),
}
# Within, over each border of each dimension, and wholly outside. An H200 takes a column only where its bytes are a
# multiple of 16 (tried: any other is an illegal instruction).
FLAT = [(0, 0, 0, 0), (64, 8, 2, 1), (-8, 0, 0, 0), (-64, 0, 1, 0), (160, 0, 0, 2), (152, 3, 1, 1)]
FLAT += [(0, -5, 0, 0), (0, 20, 0, 0), (0, 24, 0, 0), (0, 0, -1, 0), (0, 0, 5, 0), (0, 0, 0, -1)]
FLAT += [(0, 0, 0, 3), (-8, -1, 0, 0), (136, 17, 4, 2), (1 << 20, 0, 0, 0), (0, -(1 << 20), 0, 0)]
FLAT += [(8, 7, 3, 1)]
BOXES = {
    (64, 16, 1, 1): FLAT,
    (64, 4, 3, 2): [(0, 0, 0, 0), (64, 20, 2, 1), (-8, -2, -1, -1), (192, 22, 4, 2), (8, 5, 3, 1), (64, 8, -2, 2)],
    (64, 8, 1, 3): [(0, 0, 0, 0), (0, 16, 3, -2)],
    (64, 128, 1, 1): [(64, 0, 4, 2), (0, -100, 0, 0)],
}


@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_tma_load(machine: Machine, name: str, box: tuple[int, int, int, int]) -> None:
    view = VIEWS[name]()
    corners = BOXES[box]
    boxes, box_bytes = len(corners) // 2, 2 * box[0] * box[1] * box[2] * box[3]
    (out,) = machine.run(
        "tma_load.cu",
        "tma_load",
        maps=[Map(view, box)],
        inputs=[torch.tensor(corners, dtype=torch.int32)],
        outputs=[blank(2 * boxes * box_bytes // 4)],
        scalars=[boxes, box_bytes],
        threads=64,
        smem=boxes * box_bytes + 8,
    )
    landed = out.view(torch.int16).view(2 * boxes, -1, 64)
    for corner, got in zip(corners, landed, strict=True):
        assert torch.equal(got, swizzled(box_of(view, corner, box))), corner


def test_tma_columns_off_16_bytes_are_a_fault() -> None:
    machine = Machine(Simulator(SimulatorOptions()), torch.device("cpu"))
    view = VIEWS["dense"]()
    with pytest.raises(SimulationError, match=r"tma_load\.cu:\d+: .*column 4.* multiple of 16"):
        machine.run(
            "tma_load.cu",
            "tma_load",
            maps=[Map(view, (64, 8, 1, 1))],
            inputs=[torch.tensor([(4, 0, 0, 0)] * 4, dtype=torch.int32)],
            outputs=[blank(2 * 2 * 256)],
            scalars=[2, 1024],
            threads=64,
            smem=2 * 1024 + 8,
        )


# ---- WGMMA ----------------------------------------------------------------------------------------------------------

WIDTHS = (64, 128, 192, 256)


def whole(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers, whose products and sums float32 holds exactly in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def fractions(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# The tensor cores add in their own order and cut off low bits: a few units in the last place of the largest sum.
CLOSE = {"rtol": 2.0**-16, "atol": 2.0**-14}


@pytest.mark.parametrize("offset", [0, 1024, 140 * 1024])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
def test_wgmma_ss_k(machine: Machine, n: int, dtype: str, accumulate: bool, offset: int) -> None:
    for make, tolerance in ((whole, {"rtol": 0, "atol": 0}), (fractions, CLOSE)):
        a, b = make(64, 128, dtype=DTYPES[dtype], seed=0), make(n, 128, dtype=DTYPES[dtype], seed=1)
        c = make(64, n, dtype=torch.float32, seed=2)
        (out,) = machine.run(
            "wgmma_ss_k.cu",
            "product_ss_k",
            maps=[Map(a[None, None], (64, 64, 1, 1)), Map(b[None, None], (64, n, 1, 1))],
            inputs=[c],
            outputs=[blank(64, n, dtype=torch.float32)],
            scalars=[n, int(dtype == "fp16"), int(accumulate), offset],
            threads=128,
            smem=1024 + offset + (64 + n) * 256,
        )
        want = a.double() @ b.double().T + (c.double() if accumulate else 0)
        torch.testing.assert_close(out.double(), want, **tolerance)


@pytest.mark.parametrize("offset", [0, 3 * 1024, 180 * 1024])
@pytest.mark.parametrize("registers", [False, True], ids=["ss", "rs"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
def test_wgmma_mn(machine: Machine, n: int, dtype: str, registers: bool, offset: int) -> None:
    for make, tolerance in ((whole, {"rtol": 0, "atol": 0}), (fractions, CLOSE)):
        a, b = make(64, 64, dtype=DTYPES[dtype], seed=0), make(64, n, dtype=DTYPES[dtype], seed=1)
        c = make(64, n, dtype=torch.float32, seed=2)
        (out,) = machine.run(
            "wgmma_mn.cu",
            "product_mn",
            maps=[Map(a[None, None], (64, 64, 1, 1)), Map(b[None, None], (64, 64, 1, 1))],
            inputs=[a, c],
            outputs=[blank(64, n, dtype=torch.float32)],
            scalars=[n, int(dtype == "fp16"), int(registers), offset],
            threads=128,
            smem=1024 + offset + (64 + n) * 128,
        )
        want = a.double() @ b.double() + c.double()
        torch.testing.assert_close(out.double(), want, **tolerance)
