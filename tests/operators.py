"""A small call of every operator, for tests of what torch does with them: compile, export, other devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mlaforge.api import MLA

Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Call:
    """A layer of a few operations around one of ours; and the operator with its own arguments."""

    layer: Callable[..., Results]
    tensors: tuple[torch.Tensor, ...]
    smaller: tuple[torch.Tensor, ...]
    """Such tensors of another size."""
    operator: Any
    arguments: tuple[Any, ...]
    into: tuple[torch.Tensor, ...] = ()
    """Results that the operator's other form, `_out`, writes to, behind the tensors."""
    varies: tuple[tuple[int, int], ...] = ()
    """Tensors and their dimensions that an export leaves open."""

    def copies(self, smaller: bool = False) -> tuple[torch.Tensor, ...]:
        """Give tensors that the layer may write to."""
        return tuple(each.clone() for each in (self.smaller if smaller else self.tensors))

    def out_arguments(self) -> tuple[Any, ...]:
        """Give the arguments of the operator's other form."""
        first = next(i for i, each in enumerate(self.arguments) if isinstance(each, str))
        # What gather's first form takes as a number, its other form has as the rows of its result.
        tensors = [each for each in self.arguments[:first] if not isinstance(each, int)]
        return (*tensors, *self.into, *self.arguments[first:])


class Layer(torch.nn.Module):
    """What torch.export takes."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call.layer

    def forward(self, *tensors: torch.Tensor) -> Results:
        return self.call(*tensors)


def calls(mla: MLA, device: str) -> dict[str, Call]:
    """Make a call of each operator with the kernels of deepseek_v3, of 4 heads, for a few requests.

    Sizes that differ between the two sets of tensors equal no other: what is equal once is so always to torch.
    """
    random = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random) / 4).bfloat16().to(device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    heads = 4
    cache, table, lengths = normal(5, 64, 576), ints(2, 0, 1, 3, 4, 4).view(3, 2), ints(70, 9, 64)
    made = {}

    def decode(q: torch.Tensor, *others: torch.Tensor) -> Results:
        out, lse = mla.decode(q * 2, *others, causal=True)  # type: ignore[arg-type, misc]
        return out + 1, lse

    q = normal(3, 2, heads, 576)
    results = (empty(3, 2, heads, 512), empty(3, heads, 2, dtype=torch.float32))
    made["decode"] = Call(
        decode,
        (q, cache, table, lengths),
        (q[:2], cache, table[:2], lengths[:2]),
        torch.ops.mlaforge.decode,
        (q, cache, table, lengths, None, mla._runner.key, True, 0.1),
        results,
        ((0, 0), (2, 0), (3, 0)),
    )

    def prefill(q: torch.Tensor, *others: torch.Tensor) -> Results:
        out, lse = mla.prefill(q * 2, *others)  # type: ignore[arg-type, misc]
        return out + 1, lse

    borders, nearer = ints(0, 5, 12, 12), ints(0, 5, 8, 11)
    parts = (normal(12, heads, 192), normal(12, heads, 192), normal(12, heads, 128), borders, borders.clone())
    of_prefill = (empty(12, heads, 128), empty(heads, 12, dtype=torch.float32))
    key = mla.chunked.key
    made["prefill"] = Call(
        prefill,
        parts,
        (*(each[:11] for each in parts[:3]), nearer, nearer),
        torch.ops.mlaforge.prefill,
        (*parts, key, True, 0.1),
        of_prefill,
        ((0, 0), (1, 0), (2, 0)),
    )

    def chunked(q: torch.Tensor, latent: torch.Tensor, *others: torch.Tensor) -> Results:
        out, lse = mla.chunked_prefill(q * 2, latent, *others, max_context=70, workspace_tokens=256)  # type: ignore[arg-type, call-arg]
        return out + 1, lse

    new = (normal(12, heads, 192), normal(12, 576), normal(heads, 256, 512), cache, table, borders, lengths)
    made["chunked_prefill"] = Call(
        chunked,
        new,
        (new[0][:11], new[1][:11], *new[2:5], nearer, lengths),
        torch.ops.mlaforge.chunked_prefill,
        (*new, None, None, None, key, 70, 256, None, 0.1),
        of_prefill,
        ((0, 0), (1, 0)),
    )

    def gather(*tensors: torch.Tensor) -> Results:
        return (mla.gather(*tensors[:3], seq_starts=tensors[3], total_tokens=14) + 1,)  # type: ignore[misc]

    ranges = (cache, table, ints(0, 10, 13, 14), ints(60, 2, 5))
    fewer = (cache, table[:2], ints(0, 10, 14), ints(60, 2))
    memory = mla._memory.key
    made["gather"] = Call(
        gather, ranges, fewer, torch.ops.mlaforge.gather, (*ranges, None, 14, memory), (empty(14, 576),)
    )

    def append(c_kv: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, *others: torch.Tensor) -> Results:
        slots, weight, positions, angles = others
        mla.append(
            c_kv * 2,
            k_rope,
            cache,
            slots,
            norm_weight=weight,
            positions=positions,
            cos_sin_cache=angles,
            interleaved=True,
        )
        return (cache + 1,)

    angles = torch.randn(20, 64, generator=random).to(device)
    tokens = (
        *(normal(6, 512), normal(6, 64), cache),
        *(torch.arange(6, device=device) * 40, normal(512), torch.arange(6, device=device) * 3, angles),
    )
    made["append"] = Call(
        append,
        tokens,
        tuple(each[:3] if i in (0, 1, 3, 5) else each for i, each in enumerate(tokens)),
        torch.ops.mlaforge.append,
        (*tokens, None, 1e-6, True, memory),
        varies=((0, 0), (1, 0), (3, 0), (5, 0)),
    )

    def merge(out1: torch.Tensor, *others: torch.Tensor) -> Results:
        out, lse = mla.merge(out1 * 2, *others)  # type: ignore[arg-type, misc]
        return out + 1, lse

    halves = tuple(x for _ in range(2) for x in (normal(6, heads, 128), normal(heads, 6).float()))
    made["merge"] = Call(
        merge,
        halves,
        tuple(each[:5] if each.dim() == 3 else each[:, :5] for each in halves),
        torch.ops.mlaforge.merge,
        (*halves, memory),
        (empty(6, heads, 128), empty(heads, 6, dtype=torch.float32)),
        ((0, 0), (1, 1), (2, 0), (3, 1)),
    )
    return made


NAMES = ("decode", "prefill", "chunked_prefill", "gather", "append", "merge")


def equal(got: Results, want: Results) -> bool:
    """Compare to the bit; nothing may be left unwritten."""
    return all(torch.equal(x, y) and bool(x.isfinite().all()) for x, y in zip(got, want, strict=True))
