"""Every device primitive by itself: the same small kernel, on the same input, under the simulator and on an H200.

The kernels lie in primitives/, one file a primitive. Each is compared with what torch makes of its input: bit by bit
where the operation is exact, which products of small integers are, too.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mlaforge.compiler import CompiledKernel, compile_kernel
from mlaforge.formats import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3
from mlaforge.launch import Cuda, CudaKernel, DefinedTensor, LaunchTensor, TensorMapShape
from mlaforge.manifest import Parameter
from mlaforge.simulator import MODES, SimulatedKernel, SimulationError, Simulator, SimulatorOptions
from mutants import VARIABLE, Mutation, switch_in

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
    stored: bool = False
    """Whether the kernel stores to it; then the view is the first of the results."""


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
    sources: Path = field(default_factory=lambda: folder())

    def launch(
        self,
        source: str,
        entry: str,
        *,
        maps: Sequence[Map] = (),
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor],
        defined: Collection[int] = (),
        scalars: Sequence[int] = (),
        threads: int,
        blocks: int = 1,
        cluster: int = 1,
        smem: int = 0,
        overlap_previous: bool = False,
    ) -> list[torch.Tensor]:
        """Launch a kernel whose parameters are maps, inputs, outputs and integers, in this order; the outputs.

        Tensors that lie on the device already are used where they are. Of the outputs `defined`, by their number, the
        kernel may read what they hold.
        """
        views = [moved(each.view, self.device) for each in maps]
        into = [tensor.to(self.device) for tensor in outputs]
        tensors = [*(moved(tensor, self.device) for tensor in inputs), *into]
        encoded = []
        for each, view in zip(maps, views, strict=True):
            dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[view.dtype]
            shape = TensorMapShape(dtype, tuple(view.shape[::-1]), tuple(view.stride()[-2::-1]), each.box)
            encoded.append(self.backend.encode_tensor_map(shape, view.data_ptr()))
        touched = [LaunchTensor(f"map {i}", view, writable=maps[i].stored) for i, view in enumerate(views)]
        for i, tensor in enumerate(tensors):
            kind = DefinedTensor if i - len(inputs) in defined else LaunchTensor
            touched.append(kind(f"tensor {i}", tensor, writable=i >= len(inputs)))
        if entry not in self.kernels:
            parameters = [Parameter(f"tensor{i}", "void*") for i in range(len(tensors))]
            parameters += [Parameter(f"scalar{i}", "int") for i in range(len(scalars))]
            self.kernels[entry] = self.backend.kernel(
                self.sources / source, "sm_90a", entry, len(maps), parameters, smem
            )
        self.kernels[entry].launch(
            self.device,
            (blocks, 1, 1),
            threads,
            encoded,
            [*(tensor.data_ptr() for tensor in tensors), *scalars],
            touched,
            overlap_previous=overlap_previous,
            cluster=(cluster, 1, 1),
        )
        return [*(view for each, view in zip(maps, views, strict=True) if each.stored), *into]

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
    "wgmma_mn_k.cu": {"HGMMA"},
    "stmatrix.cu": {"STSM"},
    "ldmatrix.cu": {"LDSM"},
    "bulk_load.cu": {"UBLKCP"},
    "bulk_store.cu": {"UBLKCP", "UTMACMDFLUSH", "DEPBAR"},
    "copy_async.cu": {"LDGSTS", "ARRIVES", "LDGDEPBAR", "DEPBAR"},
    "tma_store.cu": {"UTMASTG"},
    "atomics.cu": {"ATOMG", "MEMBAR"},
    "cluster.cu": {"UCGABAR_ARV", "UCGABAR_WAIT"},
    "multicast.cu": {"UTMALDG"},
    "wgmma_e4m3.cu": {"QGMMA"},
    "wgmma_rs_k.cu": {"HGMMA"},
    "codes.cu": {"F2FP"},
    "unwritten.cu": {"UTMALDG", "HGMMA", "LDSM", "STSM", "UBLKCP"},
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


def test_unpack(machine: Machine) -> None:
    x = numbers(3000).view(torch.int16)
    x = torch.cat([x, torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)])
    pairs = len(x) // 2
    (out,) = machine.run(
        "unpack.cu",
        "unpack_pairs",
        inputs=[x.view(torch.int32)],
        outputs=[blank(4 * pairs, dtype=torch.float32)],
        scalars=[pairs],
        threads=128,
    )
    for half, dtype in zip(out.view(2, -1), DTYPES.values(), strict=True):
        want = x.view(dtype).float()
        nan = want.isnan()
        assert torch.equal(half.isnan(), nan)
        assert torch.equal(half[~nan].view(torch.int32), want[~nan].view(torch.int32))


def code_borders(decode: Callable[[torch.Tensor], torch.Tensor], codes: int) -> torch.Tensor:
    """Positive numbers that are codes, those half way between neighbours, and the float32 beside each."""
    values = decode(torch.arange(codes, dtype=torch.uint8))
    middles = (values[1:] + values[:-1]) / 2
    exact = torch.cat([values, middles, values[-1:] * torch.tensor([1.01, 1.5, 2.0, 1e9])])
    return torch.cat([exact, exact.nextafter(exact * 0), exact.nextafter(exact * 2 + 1)])


def bits_differ(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Where float32 differ, NaN being equal whatever its sign and payload."""
    return (got.view(torch.int32) != want.view(torch.int32)) & ~(got.isnan() & want.isnan())


def eights(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(-len(x) % 8)])


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    return words.view(torch.uint8)


def as_codes(words: torch.Tensor) -> torch.Tensor:
    """Give the e2m1 codes of words, two a byte, the first in the low bits."""
    packed = as_bytes(words)
    return torch.stack([packed & 15, packed >> 4], -1).flatten()


def test_codes_of_numbers(machine: Machine) -> None:
    borders = torch.cat([code_borders(decode_e4m3, 0x7F), code_borders(decode_e2m1, 8)])
    x = eights(torch.cat([hard_floats(), borders, -borders]))
    count = len(x) // 8
    outputs = [blank(2 * count), blank(count), blank(len(x), dtype=torch.float32)]
    e4m3, e2m1, maxima = machine.run("codes.cu", "encode", inputs=[x], outputs=outputs, scalars=[count], threads=128)
    assert torch.equal(as_bytes(e4m3), encode_e4m3(x))
    assert torch.equal(as_codes(e2m1), encode_e2m1(x))
    rows = x.view(-1, 8)
    # torch.maximum lets NaN through, too; of zeros of both signs either is the larger one.
    want = torch.maximum(rows, rows.roll(-1, 1)).flatten()
    assert not bits_differ(maxima, want)[want != 0].any() and bool((maxima[want == 0] == 0).all())


def test_numbers_of_codes(machine: Machine) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    outputs = [blank(256, dtype=torch.float32), blank(512, dtype=torch.float32)]
    e4m3, e2m1 = machine.run("codes.cu", "decode", inputs=[codes], outputs=outputs, scalars=[32], threads=128)
    assert not bits_differ(e4m3, decode_e4m3(codes)).any()
    assert not bits_differ(e2m1, decode_e2m1(torch.stack([codes & 15, codes >> 4], -1).flatten())).any()


def test_quotients_become_the_codes_of_the_rounded_ones(machine: Machine) -> None:
    """By scales of any size: numbers of every size, and those whose quotients lie on the borders between codes."""
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(1 << 23, 1 << 24, (600,), generator=generator).float()
    scales = odd * torch.exp2(torch.randint(-149, 100, (600,), generator=generator).double() - 23).float()
    special = [2.0**-126, 2.0**-90, 2.0**-91, 2.0**90, 2.0**91, 1.0, 0.1, torch.inf, torch.nan, 3e38]
    scales = torch.cat([scales.clamp(min=2.0**-126), torch.tensor(special)])
    borders = torch.cat([code_borders(decode_e4m3, 0x7F), code_borders(decode_e2m1, 8)])
    chosen = borders[torch.randint(len(borders), (len(scales), 24), generator=generator)]
    near = (chosen.double() * scales.double().unsqueeze(1)).float()
    x = torch.cat(
        [near, near.nextafter(near * 2), -near.nextafter(near * 0), numbers(len(scales), 8).view(torch.float32)], 1
    )
    x[::7, 0], x[1::7, 0], x[2::7, 0], x[3::7, 0] = torch.inf, torch.nan, -0.0, -(2.0**-149)
    each = scales.repeat_interleave(x.shape[1] // 8)
    outputs = [blank(2 * len(each)), blank(len(each))]
    e4m3, e2m1 = machine.run(
        "codes.cu", "quotients", inputs=[x.flatten(), each], outputs=outputs, scalars=[len(each)], threads=128
    )
    want = x / scales.unsqueeze(1)
    assert torch.equal(as_bytes(e4m3), encode_e4m3(want).flatten())
    assert torch.equal(as_codes(e2m1), encode_e2m1(want).flatten())


def test_scales_of_groups(machine: Machine) -> None:
    amax = torch.cat([hard_floats().abs(), code_borders(decode_e4m3, 0x7F) * 6])
    tensor = torch.exp2(torch.rand(len(amax), generator=torch.Generator().manual_seed(0)) * 14 - 7)
    tensor[-len(amax) // 2 :] = 1.0
    outputs = [blank(len(amax), dtype=torch.float32), blank(len(amax)), blank(len(amax), dtype=torch.float32)]
    of_groups, codes, of_blocks = machine.run(
        "codes.cu", "scales", inputs=[amax, tensor], outputs=outputs, scalars=[len(amax)], threads=128
    )
    assert not bits_differ(of_groups, (amax / torch.tensor(448.0)).clamp(min=2.0**-126)).any()
    want = encode_e4m3((amax / (6.0 * tensor)).clamp(min=2.0**-9)).masked_fill(~amax.isfinite(), 0x7F)
    assert torch.equal(codes.to(torch.uint8), want)
    assert not bits_differ(of_blocks, decode_e4m3(want)).any()


def test_approximate_math(machine: Machine) -> None:
    x = torch.cat([torch.linspace(-130, 130, 4001), hard_floats()[:2048], torch.logspace(-37, 37, 999)])
    special = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, 1.0, -1.0, 2.0**-130, -200.0, 128.0, 2.0**100])
    x = torch.cat([x, special])
    (out,) = machine.run(
        "approx.cu",
        "approx",
        inputs=[x],
        outputs=[blank(4 * len(x) + 2, dtype=torch.float32)],
        scalars=[len(x)],
        threads=128,
    )
    exponential, logarithm, root, inverse = out[:-2].view(4, -1)
    tiny = torch.finfo(torch.float32).tiny
    want = x.double().exp2()
    # Below the normal numbers there is only zero, on either side.
    want = torch.where(want < tiny, 0.0, torch.where(want > torch.finfo(torch.float32).max, torch.inf, want))
    torch.testing.assert_close(exponential.double(), want, rtol=2.0**-21, atol=tiny, equal_nan=True)
    flushed = torch.where(x.abs() < tiny, x * 0, x).double()
    torch.testing.assert_close(logarithm.double(), flushed.log2(), rtol=2.0**-22, atol=2.0**-21, equal_nan=True)
    torch.testing.assert_close(root.double(), flushed.rsqrt(), rtol=2.0**-22, atol=0, equal_nan=True)
    torch.testing.assert_close(inverse.double(), flushed.reciprocal(), rtol=2.0**-22, atol=tiny, equal_nan=True)
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


def run_memory(machine: Machine) -> None:
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


def test_loads_and_stores(machine: Machine) -> None:
    run_memory(machine)


def test_wide_loads(machine: Machine) -> None:
    words, longs = numbers(64, 4), numbers(64, 2, seed=1).view(torch.int64).flatten()
    (out,) = machine.run("wide_loads.cu", "wide_loads", inputs=[words, longs], outputs=[blank(256 + 128)], threads=64)
    assert torch.equal(out[:256].view(64, 4), words.flip(1))
    assert torch.equal(out[256:].view(64, 2), longs.view(torch.int32).view(64, 2).flip(1))


def test_stmatrix(machine: Machine) -> None:
    registers = numbers(2, 32, 4)
    rows = torch.randperm(64, generator=torch.Generator().manual_seed(1)).to(torch.int32).view(2, 32)
    out, transposed, two = machine.run(
        "stmatrix.cu",
        "stmatrix",
        inputs=[registers, rows],
        outputs=[blank(64, 4) for _ in range(3)],
        threads=64,
        smem=1024,
    )
    want, want_transposed = blank(64, 4), blank(64, 4)
    for warp in range(2):
        for matrix in range(4):
            for row in range(8):
                # A row's four pairs of columns are in four lanes, its address in a lane of its own.
                want[rows[warp, 8 * matrix + row]] = registers[warp, 4 * row : 4 * row + 4, matrix]
            elements = registers[warp, :, matrix].contiguous().view(torch.int16).view(8, 8)
            want_transposed[rows[warp, 8 * matrix : 8 * matrix + 8]] = elements.T.contiguous().view(torch.int32)
    assert torch.equal(out, want) and torch.equal(transposed, want_transposed)
    # Rows that the upper lanes name stay as they were.
    want_two = want.clone()
    want_two[rows[:, :16].flatten()] = want_transposed[rows[:, :16].flatten()]
    assert torch.equal(two, want_two)


def test_ldmatrix(machine: Machine) -> None:
    words = numbers(64, 4)
    rows = torch.randperm(64, generator=torch.Generator().manual_seed(2)).to(torch.int32).view(2, 32)
    straight, transposed = machine.run(
        "ldmatrix.cu",
        "ldmatrix",
        inputs=[words, rows],
        outputs=[blank(2, 32, 4), blank(2, 32, 4)],
        threads=64,
        smem=1024,
    )
    # Warp, matrix, row, column.
    matrices = words.view(torch.int16)[rows.long()].view(2, 4, 8, 8)
    for got, want in ((straight, matrices), (transposed, matrices.transpose(2, 3))):
        assert torch.equal(got.view(torch.int16).view(2, 32, 4, 2), want.reshape(2, 4, 32, 2).transpose(1, 2))


def run_bulk_load(machine: Machine) -> None:
    x = numbers(2048)
    # From, to, both in units of 16 bytes; bytes.
    pieces = [
        [(0, 0, 16), (17, 2, 48), (3, 9, 2048), (200, 140, 4096)],
        [(511, 1, 16), (5, 5, 32), (6, 300, 16), (0, 7, 1600)],
    ]
    words = 4 * 400
    (out,) = machine.run(
        "bulk_load.cu",
        "bulk_load_pieces",
        inputs=[x, torch.tensor(pieces, dtype=torch.int32)],
        outputs=[blank(2, words)],
        scalars=[words],
        threads=64,
        smem=16 + 4 * words,
    )
    want = torch.zeros(words, dtype=torch.int32)
    for got, phase in zip(out, pieces, strict=True):
        for source, target, size in phase:
            want[4 * target : 4 * target + size // 4] = x[4 * source : 4 * source + size // 4]
        assert torch.equal(got, want)


def test_bulk_load(machine: Machine) -> None:
    run_bulk_load(machine)


def run_copy_async(machine: Machine) -> None:
    rounds, pieces = 7, 64
    x = numbers(500, 4)
    source = torch.randint(0, 500, (rounds, pieces), dtype=torch.int32)
    target = torch.stack([torch.randperm(pieces) for _ in range(rounds)]).to(torch.int32)
    out, own = machine.run(
        "copy_async.cu",
        "copy_async_pieces",
        inputs=[x, source, target],
        outputs=[blank(rounds, pieces, 4), blank(32, 4)],
        scalars=[rounds],
        threads=64,
        smem=2 * 16 * pieces + 512 + 32,
    )
    assert torch.equal(own, x[:32])
    for got, places, rows in zip(out, target, source, strict=True):
        assert torch.equal(got[places], x[rows])


def test_copy_async(machine: Machine) -> None:
    run_copy_async(machine)


def run_bulk_store(machine: Machine) -> None:
    rounds = 7
    x = numbers(rounds, 64) // 2
    out, again = machine.run(
        "bulk_store.cu",
        "bulk_store_lines",
        inputs=[x],
        outputs=[blank(rounds, 64), blank(64)],
        scalars=[rounds],
        threads=64,
        smem=512,
    )
    assert torch.equal(out, x + 1) and torch.equal(again, x[-1] + 1)


def test_bulk_store(machine: Machine) -> None:
    run_bulk_store(machine)


# ---- Blocks that meet -----------------------------------------------------------------------------------------------


def run_atomics(machine: Machine, acq_rel: bool = False, defined: Collection[int] = (1,)) -> None:
    blocks = 12
    x = numbers(blocks, 64) // 100
    lines, counter, sums = machine.run(
        "atomics.cu",
        "last_block_adds",
        inputs=[x],
        outputs=[blank(blocks, 64), torch.zeros(1, dtype=torch.int32), blank(64)],
        defined=defined,
        scalars=[int(acq_rel)],
        threads=64,
        blocks=blocks,
        smem=16,
    )
    assert torch.equal(lines, x) and counter == blocks
    assert torch.equal(sums, x.sum(0).to(torch.int32))


@pytest.mark.parametrize("acq_rel", [False, True], ids=["relaxed and fences", "acq_rel"])
def test_atomics(machine: Machine, acq_rel: bool) -> None:
    run_atomics(machine, acq_rel)


def run_handover(machine: Machine, cluster: int = 4) -> None:
    blocks = 4
    flags, values = machine.run(
        "handover.cu",
        "handover",
        outputs=[torch.zeros(blocks, dtype=torch.int32), blank(blocks)],
        defined=[0],
        threads=32,
        blocks=blocks,
        cluster=cluster,
    )
    assert flags.tolist() == [1] * blocks and values.tolist() == [101 + i for i in range(blocks)]


def test_handover(machine: Machine) -> None:
    run_handover(machine)


def run_cluster(machine: Machine, size: int = 2) -> None:
    blocks, rounds = 2 * size, 5
    ranks, lines, out = machine.run(
        "cluster.cu",
        "cluster",
        outputs=[blank(blocks, 2), blank(blocks, 64), blank(blocks, 64)],
        scalars=[rounds],
        threads=64,
        blocks=blocks,
        cluster=size,
        smem=16,
    )
    block = torch.arange(blocks)
    assert torch.equal(ranks, torch.stack([block % size, torch.full_like(block, size)], 1).to(torch.int32))
    following = block // size * size + (block + 1) % size
    assert torch.equal(out, lines[following] + rounds)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_cluster(machine: Machine, size: int) -> None:
    run_cluster(machine, size)


def run_multicast(machine: Machine, size: int = 2) -> None:
    blocks, rounds = 2 * size, 3
    view = sequence_16_bit(2, rounds, 16 * size, 64)
    (out,) = machine.run(
        "multicast.cu",
        "multicast",
        maps=[Map(view, (64, 16, 1, 1))],
        outputs=[blank(blocks, rounds, 16 * size * 32)],
        scalars=[rounds],
        threads=64,
        blocks=blocks,
        cluster=size,
        smem=size * 2048 + 16,
    )
    for block in range(blocks):
        for round in range(rounds):
            assert torch.equal(out[block, round].view(torch.int16).view(-1, 64), swizzled(view[block // size, round]))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_multicast(machine: Machine, size: int) -> None:
    run_multicast(machine, size)


@pytest.mark.parametrize("mask", [0b0001, 0b0110, 0b1011, 0b1111])
def test_multicast_to_some_blocks(machine: Machine, mask: int) -> None:
    view = sequence_16_bit(1, 1, 16, 64)
    (out,) = machine.run(
        "multicast_some.cu",
        "multicast_some",
        maps=[Map(view, (64, 16, 1, 1))],
        outputs=[blank(4, 512)],
        scalars=[mask],
        threads=64,
        blocks=4,
        cluster=4,
        smem=2048 + 8,
    )
    for rank in range(4):
        if mask >> rank & 1:
            assert torch.equal(out[rank].view(torch.int16).view(-1, 64), swizzled(view[0, 0]))
        else:
            assert torch.equal(out[rank], blank(512))


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


# Boxes that don't meet, over the end of each dimension, and one wholly outside. Before its beginning none may start.
STORED = {
    (64, 8, 1, 1): [
        (0, 0, 0, 0),
        (64, 0, 0, 0),
        (120, 8, 0, 0),
        (56, 4, 1, 1),
        (56, 21, 2, 2),
        (0, 0, 5, 0),
    ],
    (64, 4, 3, 2): [(0, 0, 0, 0), (104, 22, 4, 2), (32, 10, 2, 0)],
}


def run_tma_store(machine: Machine, name: str = "dense", box: tuple[int, int, int, int] = (64, 8, 1, 1)) -> None:
    view, corners = VIEWS[name](), STORED[box]
    rows = box[1] * box[2] * box[3]
    contents = sequence_16_bit(len(corners), rows, 64)
    images = torch.stack([swizzled(each) for each in contents])
    before = moved(view, torch.device("cpu")).clone()
    (after,) = machine.run(
        "tma_store.cu",
        "tma_store",
        maps=[Map(view, box, stored=True)],
        inputs=[images.view(torch.int32), torch.tensor(corners, dtype=torch.int32)],
        outputs=[],
        scalars=[len(corners), rows * 128],
        threads=64,
        smem=len(corners) * rows * 128,
    )
    want = before.view(torch.int16)
    for corner, content in zip(corners, contents, strict=True):
        block = content.view(torch.int16).view(*reversed(box))
        target, source = [], []
        for first, length, size in zip(reversed(corner), reversed(box), view.shape, strict=True):
            begin, end = max(first, 0), min(first + length, size)
            target.append(slice(begin, max(begin, end)))
            source.append(slice(begin - first, max(begin, end) - first))
        want[tuple(target)] = block[tuple(source)]
    assert torch.equal(after.view(torch.int16), want)


@pytest.mark.parametrize("box", STORED, ids=str)
@pytest.mark.parametrize("name", ["dense", "cut out of a larger one", "dimensions in another order"])
def test_tma_store(machine: Machine, name: str, box: tuple[int, int, int, int]) -> None:
    run_tma_store(machine, name, box)


# ---- WGMMA ----------------------------------------------------------------------------------------------------------

NARROW = (8, 16, 24, 32, 40, 48, 56)
WIDTHS = (64, 128, 192, 256)


def whole(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers, whose products and sums float32 holds exactly in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def fractions(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# The tensor cores add in their own order and cut off low bits: a few units in the last place of the largest sum.
CLOSE = {"rtol": 2.0**-16, "atol": 2.0**-14}


def run_wgmma_ss_k(
    machine: Machine, n: int = 64, dtype: str = "bf16", accumulate: bool = False, offset: int = 0
) -> None:
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


@pytest.mark.parametrize("offset", [0, 1024, 140 * 1024])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (*NARROW, *WIDTHS, 80))
def test_wgmma_ss_k(machine: Machine, n: int, dtype: str, accumulate: bool, offset: int) -> None:
    run_wgmma_ss_k(machine, n, dtype, accumulate, offset)


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


@pytest.mark.parametrize("offset", [0, 3 * 1024, 180 * 1024])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (*NARROW, 64))
def test_wgmma_mn_k(machine: Machine, n: int, dtype: str, offset: int) -> None:
    for make, tolerance in ((whole, {"rtol": 0, "atol": 0}), (fractions, CLOSE)):
        a, b = make(64, 64, dtype=DTYPES[dtype], seed=0), make(n, 64, dtype=DTYPES[dtype], seed=1)
        c = make(64, n, dtype=torch.float32, seed=2)
        (out,) = machine.run(
            "wgmma_mn_k.cu",
            "product_mn_k",
            maps=[Map(a[None, None], (64, 64, 1, 1)), Map(b[None, None], (64, n, 1, 1))],
            inputs=[c],
            outputs=[blank(64, n, dtype=torch.float32)],
            scalars=[n, int(dtype == "fp16"), offset],
            threads=128,
            smem=1024 + offset + (64 + n) * 128,
        )
        want = a.double().T @ b.double().T + c.double()
        torch.testing.assert_close(out.double(), want, **tolerance)


def run_wgmma_rs_k(
    machine: Machine, n: int = 64, dtype: str = "bf16", accumulate: bool = False, offset: int = 0
) -> None:
    for make, tolerance in ((whole, {"rtol": 0, "atol": 0}), (fractions, CLOSE)):
        a, b = make(64, 64, dtype=DTYPES[dtype], seed=0), make(n, 64, dtype=DTYPES[dtype], seed=1)
        c = make(64, n, dtype=torch.float32, seed=2)
        (out,) = machine.run(
            "wgmma_rs_k.cu",
            "product_rs_k",
            maps=[Map(b[None, None], (64, n, 1, 1))],
            inputs=[a, c],
            outputs=[blank(64, n, dtype=torch.float32)],
            scalars=[n, int(dtype == "fp16"), int(accumulate), offset],
            threads=128,
            smem=1024 + offset + n * 128,
        )
        want = a.double() @ b.double().T + (c.double() if accumulate else 0)
        torch.testing.assert_close(out.double(), want, **tolerance)


@pytest.mark.parametrize("offset", [0, 5 * 1024])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
def test_wgmma_rs_k(machine: Machine, n: int, dtype: str, accumulate: bool, offset: int) -> None:
    run_wgmma_rs_k(machine, n, dtype, accumulate, offset)


@pytest.mark.parametrize("offset", [0, 5 * 1024])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("registers", [False, True], ids=["ss", "rs"])
@pytest.mark.parametrize("n", WIDTHS)
def test_wgmma_e4m3(machine: Machine, n: int, registers: bool, accumulate: bool, offset: int) -> None:
    # The tensor cores keep fewer bits of a sum of e4m3 products than float32 has; those of these integers fit.
    small = functools.partial(torch.randint, -2, 3)
    every = functools.partial(torch.randint, 0, 256)
    for make in (small, every):
        generator = torch.Generator().manual_seed(n)
        a, b = make((64, 128), generator=generator), make((n, 128), generator=generator)
        c = torch.randint(-8, 9, (64, n), generator=generator).float()
        if make is small:
            a, b = a.float().to(torch.float8_e4m3fn), b.float().to(torch.float8_e4m3fn)
            tolerance = {"rtol": 0, "atol": 0}
        else:
            # Every number but NaN.
            a = torch.where(a & 0x7F == 0x7F, 0, a).to(torch.uint8).view(torch.float8_e4m3fn)
            b = torch.where(b & 0x7F == 0x7F, 0, b).to(torch.uint8).view(torch.float8_e4m3fn)
            tolerance = {"rtol": 2.0**-8, "atol": 448.0**2 * 2.0**-7}
        # A tensor map has elements of two bytes, here two numbers each.
        pairs = [each.view(torch.bfloat16) for each in (a, b)]
        (out,) = machine.run(
            "wgmma_e4m3.cu",
            "product_e4m3",
            maps=[Map(pairs[0][None, None], (64, 64, 1, 1)), Map(pairs[1][None, None], (64, n, 1, 1))],
            inputs=[pairs[0], c],
            outputs=[blank(64, n, dtype=torch.float32)],
            scalars=[n, int(registers), int(accumulate), offset],
            threads=128,
            smem=1024 + offset + (64 + n) * 128,
        )
        want = a.double() @ b.double().T + (c.double() if accumulate else 0)
        torch.testing.assert_close(out.double(), want, **tolerance)


# ---- What nobody has written ----------------------------------------------------------------------------------------


def run_unwritten(machine: Machine, boxes: int = 3) -> None:
    tile = whole(64, 64, dtype=torch.bfloat16, seed=5)
    products, copy = machine.run(
        "unwritten.cu",
        "unwritten_rows",
        maps=[Map(tile[None, None], (64, 16, 1, 1))],
        outputs=[blank(64, 64, dtype=torch.float32), blank(64, 32)],
        scalars=[boxes],
        threads=128,
        smem=1024 + 2 * 64 * 128,
    )
    tile[16 * boxes :] = 0
    assert torch.equal(products, tile.float() @ tile.float().T)
    assert torch.equal(copy.view(torch.int16), swizzled(tile))


@pytest.mark.parametrize("boxes", [1, 3, 4])
def test_rows_that_nobody_has_written(machine: Machine, boxes: int) -> None:
    run_unwritten(machine, boxes)


NAN_BITS = (0x7FC0, 0x7FC1, 0x7FC2, 0x7FFE, 0x7FFF, 0xFFC2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", NAN_BITS, ids=hex)
def test_nan_of_the_user_is_a_number_like_others(bits: int, mode: str) -> None:
    """Whatever its payload, also those that the simulator gives to what is undefined."""
    simulated = Machine(Simulator(SimulatorOptions(mode=mode)), torch.device("cpu"))
    tile = whole(64, 64, dtype=torch.bfloat16, seed=5)
    tile.view(torch.int16)[3, 5] = bits - (bits >> 15 << 16)
    products, copy = simulated.run(
        "unwritten.cu",
        "unwritten_rows",
        maps=[Map(tile[None, None], (64, 16, 1, 1))],
        outputs=[blank(64, 64, dtype=torch.float32), blank(64, 32)],
        scalars=[4],
        threads=128,
        smem=1024 + 2 * 64 * 128,
    )
    assert torch.equal(products.isnan(), (tile.float() @ tile.float().T).isnan())
    assert torch.equal(copy.view(torch.int16), swizzled(tile))


# ---- What the simulator finds ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A change of a kernel's text, and the report that follows under some schedule, or under all."""

    name: str
    source: str
    run: Callable[[Machine], None]
    old: str
    new: str
    finds: str
    reported_in: str = ""
    """The file of which the report names a line, if it is not `source`."""
    always: bool = False


READ = r"warp \d of block \(0, 0, 0\) reads byte \d+ of shared memory, which is uninitialised so far, at "
WAITED = "  wgmma_wait<0>();\n"
CLUSTER_EXCHANGE = """\
  cluster_arrive();
  cluster_wait();
  const int next = (rank + 1) % size;
  int32_t value = load_global(lines + kThreads * (first + next) + t);
"""

FAULTS = (
    Fault(
        "no fence before a bulk store",
        "bulk_store.cu",
        run_bulk_store,
        "    fence_proxy_async();\n",
        "",
        "asynchronous read by a bulk store of thread 0.*no fence.proxy.async",
    ),
    Fault(
        "a buffer is written before a bulk store has read it",
        "bulk_store.cu",
        run_bulk_store,
        "bulk_wait_read<1>",
        "bulk_wait_read<2>",
        "race.*a bulk store of thread 0",
    ),
    Fault(
        "a block ends before its bulk store has read",
        "bulk_store.cu",
        run_bulk_store,
        "  if (t == 0) bulk_wait<0>();\n  __syncthreads();\n  store_global(again",
        "  if (t > kThreads) store_global(again",
        "bulk stores whose reading nobody waited for",
    ),
    Fault(
        "a result is read before it was written out",
        "bulk_store.cu",
        run_bulk_store,
        "bulk_wait<0>",
        "bulk_wait_read<0>",
        "written by a bulk store that nobody waited for",
    ),
    Fault(
        "a group is never closed",
        "bulk_store.cu",
        run_bulk_store,
        "      bulk_commit();\n",
        "",
        "race|nobody waited for",
    ),
    Fault(
        "no fence before the counter",
        "atomics.cu",
        run_atomics,
        "  fence_gpu();\n  const int before",
        "  const int before",
        "written by another block",
    ),
    Fault(
        "no fence behind the counter",
        "atomics.cu",
        run_atomics,
        "  fence_gpu();\n  return",
        "  return",
        "written by another block",
    ),
    Fault(
        "no barrier before the counter",
        "atomics.cu",
        run_atomics,
        "  __syncthreads();\n  if (t == 0) store",
        "  if (t == 0) store",
        "written by another block",
    ),
    Fault(
        "a wait for a block that runs later",
        "handover.cu",
        lambda machine: run_handover(machine, cluster=1),
        "",
        "",
        "deadlock.*a change of a word in global memory that holds 0",
    ),
    Fault(
        "a word is read without its order",
        "handover.cu",
        run_handover,
        "load_global_acquire(flags + block - 1)",
        "atomic_add_relaxed(flags + block - 1, 0)",
        "written by another block",
    ),
    Fault(
        "no barrier behind the remote mbarriers' initialisation",
        "cluster.cu",
        run_cluster,
        CLUSTER_EXCHANGE,
        "  int32_t value = 0;\n",
        "no mbarrier was initialised|without an order behind its initialisation",
    ),
    Fault(
        "no wait at the cluster's barrier",
        "cluster.cu",
        run_cluster,
        CLUSTER_EXCHANGE,
        "  cluster_arrive();\n  int32_t value = 0;\n",
        "no mbarrier was initialised|without an order behind its initialisation",
    ),
    Fault(
        "a line is read before the other block has written it",
        "cluster.cu",
        run_cluster,
        "  cluster_wait();\n",
        "",
        r"this load reads byte \d+ of tensor 1, which is uninitialised so far",
    ),
    Fault(
        "a remote arrival too few",
        "cluster.cu",
        run_cluster,
        "other < size;",
        "other < size - 1;",
        "deadlock.*of rank 1",
    ),
    Fault(
        "a remote arrival too many",
        "cluster.cu",
        run_cluster,
        "other < size; ++other)",
        "other < size + 1; ++other)",
        "rank 2 in a cluster of 2 blocks",
    ),
    Fault(
        "a block leaves while others arrive",
        "cluster.cu",
        run_cluster,
        "  cluster_sync();\n",
        "  if (rank == 0) mbarrier_arrive_remote(bar, 1);\n",
        "which has exited",
    ),
    Fault(
        "a part is replaced while another block reads it",
        "multicast.cu",
        run_multicast,
        "      if (round > 0) mbarrier_wait(empty, (round - 1) & 1);\n",
        "",
        "race.*of rank",
    ),
    Fault(
        "a block expects its own part only",
        "multicast.cu",
        run_multicast,
        "expect_tx(full, size * kPartBytes)",
        "expect_tx(full, kPartBytes)",
        "race.*TMA on mbarrier 0 of rank",
    ),
    Fault(
        "a block expects more than comes",
        "multicast.cu",
        run_multicast,
        "expect_tx(full, size * kPartBytes)",
        "expect_tx(full, (size + 1) * kPartBytes)",
        "deadlock.*of rank 0: phase 0, 0 of 1 arrivals and 2048 bytes missing",
    ),
    Fault(
        "the mbarriers are not fenced for TMA",
        "multicast.cu",
        run_multicast,
        "    fence_mbarrier_init();\n",
        "",
        "not visible to TMA",
    ),
    # Memory that nobody has written
    Fault(
        "a number is read from shared memory that nobody has written",
        "memory.cu",
        run_memory,
        "  store_shared_zero16(mine + 16);\n",
        "",
        r"this load reads byte \d+ of shared memory, which is uninitialised so far",
        always=True,
    ),
    Fault(
        "a float is read from shared memory that nobody has written",
        "memory.cu",
        run_memory,
        "  store_shared_f32(mine + 4, four[1]);\n",
        "",
        r"this load reads byte \d+ of shared memory, which is uninitialised so far",
        always=True,
    ),
    Fault(
        "products of unwritten rows of B reach a result",
        "unwritten.cu",
        run_unwritten,
        "    if (first % kRows + behind % kRows >= rows) d[i] = 0.f;\n",
        "",
        rf"this store to tensor 0 writes what is undefined \({READ}unwritten\.cu:\d+\)",
        reported_in="operands.cuh",
        always=True,
    ),
    Fault(
        "products of unwritten rows of A reach a result",
        "unwritten.cu",
        run_unwritten,
        "    if (first / kRows + behind / kRows >= rows) d[i] = 0.f;\n",
        "",
        rf"this store to tensor 0 writes what is undefined \({READ}unwritten\.cu:\d+\)",
        reported_in="operands.cuh",
        always=True,
    ),
    Fault(
        "an unwritten row reaches a result by ldmatrix, stmatrix and a bulk store",
        "unwritten.cu",
        run_unwritten,
        "    if (row >= rows) store_shared_zero16(copy + place);\n",
        "",
        rf"this store to tensor 1 writes what is undefined \({READ}unwritten\.cu:\d+\)",
        always=True,
    ),
    Fault(
        "an unwritten row reaches a result by a bulk store",
        "unwritten.cu",
        run_unwritten,
        "bulk_store(moved, copy,",
        "bulk_store(moved, tile,",
        r"this store to tensor 1 writes byte 7168 of shared memory, which is uninitialised so far",
        always=True,
    ),
    Fault(
        "an image that nobody has written is stored by TMA",
        "tma_store.cu",
        run_tma_store,
        "i < boxes * box_bytes / 4;",
        "i < boxes * box_bytes / 8;",
        r"this store to map 0 writes byte \d+ of shared memory, which is uninitialised so far",
        always=True,
    ),
    Fault(
        "a line is read that no block has written",
        "atomics.cu",
        run_atomics,
        "  store_global(lines + kThreads * block + t, load_global(in + kThreads * block + t));\n",
        "",
        r"this load reads byte \d+ of tensor 1, which is uninitialised so far",
        always=True,
    ),
    Fault(
        "a counter that the host has not set",
        "atomics.cu",
        lambda machine: run_atomics(machine, defined=()),
        "",
        "",
        r"this load reads byte 0 of tensor 2, which is uninitialised so far",
        always=True,
    ),
    Fault(
        "a copy of global memory that nobody has written",
        "bulk_load.cu",
        run_bulk_load,
        "in + 4 * load_global(piece)",
        "out + 4 * load_global(piece)",
        r"this load reads byte \d+ of shared memory, which is uninitialised "
        r"\(warp 0 of block \(0, 0, 0\) copies uninitialised bytes of tensor 2 at bulk_load\.cu:\d+\)",
        always=True,
    ),
    # What a WGMMA works with, before it was waited for
    Fault(
        "an accumulator is stored before the wait",
        "unwritten.cu",
        run_unwritten,
        WAITED,
        "",
        r"this store to tensor 0 writes what is undefined "
        r"\(an accumulator that the wgmma at unwritten\.cu:\d+ is writing\)",
        reported_in="operands.cuh",
        always=True,
    ),
    Fault(
        "an accumulator is changed before the wait",
        "wgmma_ss_k.cu",
        run_wgmma_ss_k,
        WAITED,
        "  d[0] *= 2.f;\n" + WAITED,
        "an accumulator of lane 0 was written before the wgmma was waited for",
        always=True,
    ),
    Fault(
        "an operand in registers is changed before the wait",
        "wgmma_rs_k.cu",
        run_wgmma_rs_k,
        WAITED,
        "  left[0] ^= 1;\n" + WAITED,
        "the A registers of lane 0 changed before the wgmma was waited for",
        always=True,
    ),
    Fault(
        "a warp overwrites its own operand in shared memory before the wait",
        "wgmma_ss_k.cu",
        run_wgmma_ss_k,
        WAITED,
        "  store_shared_s32(a + 2048 * warp_id() + 4 * lane_id(), 0);\n" + WAITED,
        r"race at byte \d+: this (write by thread|asynchronous read by wgmma).*not ordered by any barrier or wait",
        always=True,
    ),
)


def require_found(fault: Fault, sources: Path) -> None:
    """Run a folder's kernel with the fault in it under all schedules, or until the report is there."""
    simulator = Simulator()
    machine = Machine(simulator, torch.device("cpu"), sources=sources)
    place = rf"^{re.escape(fault.reported_in or fault.source)}:\d+: block \(\d+, 0, 0\), warp \d+, thread \d+: "
    found, others = 0, []
    schedules = list(itertools.product(range(4), MODES))
    for seed, mode in schedules:
        simulator.options = SimulatorOptions(seed=seed, mode=mode)
        try:
            fault.run(machine)
            others.append("nothing")
        except SimulationError as error:
            if re.search(f"{place}.*({fault.finds})", str(error), re.DOTALL):
                found += 1
                if not fault.always:
                    return
            else:
                others.append(str(error))
        except AssertionError:
            others.append("a wrong result")
    assert found == len(schedules), f"found in {found} of {len(schedules)} runs; in the others: {others}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_simulator_finds(fault: Fault, tmp_path: Path) -> None:
    shutil.copytree(folder(), tmp_path, dirs_exist_ok=True)
    text = (tmp_path / fault.source).read_text()
    assert fault.old in text
    (tmp_path / fault.source).write_text(text.replace(fault.old, fault.new, 1))
    require_found(fault, tmp_path)


# In one text, each behind a switch: mutants.py.
COPY_FAULTS = (
    Fault(
        "no fence between a thread's copies and a bulk store of what they wrote",
        "copy_async.cu",
        run_copy_async,
        "fence_proxy_async();",
        "",
        "write by an asynchronous copy of thread .*no fence.proxy.async",
        always=True,
    ),
    Fault(
        "copies of threads are not waited for",
        "copy_async.cu",
        run_copy_async,
        "mbarrier_wait(full, phase);",
        "",
        "race.*an asynchronous copy of thread|uninitialised",
    ),
    Fault(
        "copies of threads into a buffer that is still being read",
        "copy_async.cu",
        run_copy_async,
        "mbarrier_wait(empty, phase ^ 1);",
        "",
        "race.*an asynchronous copy of thread",
    ),
    Fault(
        "a thread reads before its own copy has landed",
        "copy_async.cu",
        run_copy_async,
        "copy_async_wait();",
        "",
        "race.*an asynchronous copy of thread|uninitialised",
    ),
    Fault(
        "a thread ends before its copies have landed",
        "copy_async.cu",
        run_copy_async,
        "copy_async_wait();",
        "return;",
        "a thread ends with asynchronous copies that it has not waited for",
        always=True,
    ),
    Fault(
        "a thread's copy of what nobody has written",
        "copy_async.cu",
        run_copy_async,
        "copy_async_16(mine, in + 4 * t);",
        "copy_async_16(mine, own + 4 * t);",
        "this load reads .* copies uninitialised bytes of tensor 4",
        always=True,
    ),
    Fault(
        "a thread's copy off 16 bytes",
        "copy_async.cu",
        run_copy_async,
        "in + 4 * load_global(from + piece)",
        "in + 4 * load_global(from + piece) + 2",
        "copy of 16 bytes from .* no multiples of 16",
        always=True,
    ),
)


@pytest.fixture(scope="session")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = shutil.copytree(folder(), tmp_path_factory.mktemp("copies") / "primitives")
    switch_in(sources, [Mutation(each.name, each.old, each.new, each.finds, each.source) for each in COPY_FAULTS])
    return sources


@pytest.mark.parametrize("number", range(len(COPY_FAULTS)), ids=[fault.name for fault in COPY_FAULTS])
def test_simulator_finds_in_copies_by_threads(number: int, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(number))
    require_found(COPY_FAULTS[number], copies)
