"""What the tests of the prefill kernel share: its shapes, and the kernel alone, without the compile of decode's."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from mlaforge.api import MLA
from mlaforge.launch import Cuda
from mlaforge.manifest import read_manifest
from mlaforge.prefill import PrefillRunner, loaded
from mlaforge.prefill_verify import kernel_of
from mlaforge.simulator import Simulator
from mlaforge_generator.emit import write_folder
from mlaforge_generator.plan import make_plan
from mlaforge_generator.render import render
from mlaforge_generator.spec import Spec, parse_spec

# By (d_qk, d_v): qk_nope_head_dim, qk_rope_head_dim, v_head_dim.
HEADS = {(192, 128): (128, 64, 128), (256, 256): (192, 64, 256), (96, 64): (64, 32, 64), (128, 128): (64, 64, 128)}


def spec_of(shape: tuple[int, int], dtype: str = "bf16", **choices: object) -> Spec:
    """Give the spec of a shape; `choices` are fields of kernels.prefill."""
    nope, rope, d_v = HEADS[shape]
    fields = ", ".join(f"{name}: {value}" for name, value in choices.items())
    return parse_spec(
        f"name: d{shape[0]}_{d_v}_{dtype}\n"
        f"model: {{num_attention_heads: 16, kv_lora_rank: 512, qk_nope_head_dim: {nope}, qk_rope_head_dim: {rope},"
        f" v_head_dim: {d_v}}}\n"
        f"cache: {{dtype: {dtype}}}\n"
        f"kernels: {{prefill: {{{fields}}}}}\n"
    )


def folder_of(spec: Spec) -> Path:
    """Generate a spec somewhere."""
    folder = Path(tempfile.mkdtemp()) / spec.name
    write_folder(folder, render(make_plan(spec)))
    return folder


class Prefill(MLA):
    """Without the other kernels, whose compile would take twice as long as the test."""

    def __init__(self, folder: Path, backend: Cuda | Simulator) -> None:
        self.manifest, self.backend = read_manifest(folder), backend
        self.runner = PrefillRunner(self.manifest, kernel_of(self.manifest), backend, f"prefill of {folder}")
        self._prefill = self.runner
        loaded.add(self.runner)


# Under the simulator, where a compile takes long, each shape is tried in one dtype.
SIMULATED_DTYPE = {shape: "fp16" if shape == (128, 128) else "bf16" for shape in HEADS}


@functools.cache
def simulated(shape: tuple[int, int]) -> Prefill:
    """Give the prefill kernel of a shape under the simulator."""
    return Prefill(folder_of(spec_of(shape, SIMULATED_DTYPE[shape])), Simulator())
