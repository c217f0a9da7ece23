"""What the tests of chunked prefill share: small specs, and the kernels that it needs, without decode's."""

from __future__ import annotations

import functools
from pathlib import Path

from mlaforge.api import MLA
from mlaforge.chunked import ChunkedPrefill
from mlaforge.chunked import loaded as loaded_chunked
from mlaforge.launch import Cuda
from mlaforge.manifest import read_manifest
from mlaforge.memory import MemoryKernels
from mlaforge.memory import loaded as loaded_memory
from mlaforge.prefill import PrefillRunner
from mlaforge.prefill import loaded as loaded_prefill
from mlaforge.prefill_verify import kernel_of
from mlaforge.simulator import Simulator
from mlaforge_generator.spec import Spec
from prefilling import SIMULATED_DTYPE, folder_of, spec_of

# Shape of the prefill kernel, rank, qk_nope_head_dim, qk_rope_head_dim, page size. The kernels that depend on none of
# the others have the text of those in prefilling.py, so that the host's compiler sees it once.
VARIANTS = {
    "pages of 16": ((96, 64), 128, 64, 32, 16),
    "no RoPE, pages of 1": ((128, 128), 128, 128, 0, 1),
}


class Chunked(MLA):
    """Without decode."""

    def __init__(self, folder: Path, backend: Cuda | Simulator) -> None:
        self.manifest, self.backend = read_manifest(folder), backend
        key = f"chunked prefill of {folder}"
        self._memory = MemoryKernels(self.manifest, backend, key)
        self._prefill = PrefillRunner(self.manifest, kernel_of(self.manifest), backend, key)
        self._chunked = ChunkedPrefill(self._prefill, self._memory, backend)
        loaded_memory.add(self._memory)
        loaded_prefill.add(self._prefill)
        loaded_chunked.add(self._chunked)


@functools.cache
def simulated(name: str = "pages of 16") -> MLA:
    """Give the kernels of one of `VARIANTS` under the simulator."""
    shape, rank, nope, rope, page_size = VARIANTS[name]
    tree = spec_of(shape, SIMULATED_DTYPE[shape]).model_dump(exclude_none=True)
    tree["model"] |= {"kv_lora_rank": rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope}
    tree["cache"]["page_size"] = page_size
    return Chunked(folder_of(Spec.model_validate(tree)), Simulator())
