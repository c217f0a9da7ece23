"""What a user calls: `load` a spec or a generated folder, then `decode`, `prefill`, `chunked_prefill`, `gather`, ..."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mlaforge.calls import kernel_key
from mlaforge.chunked import ChunkedPrefill, ContextLimits, ContextRounds, context_rounds
from mlaforge.chunked import loaded as loaded_chunked
from mlaforge.decode import DecodeRunner
from mlaforge.decode import loaded as loaded_decode
from mlaforge.launch import Cuda
from mlaforge.manifest import Manifest, read_manifest
from mlaforge.memory import MemoryKernels
from mlaforge.memory import loaded as loaded_memory
from mlaforge.prefill import PrefillRunner
from mlaforge.prefill import loaded as loaded_prefill
from mlaforge.rendered import materialise
from mlaforge.simulator import Simulator, SimulatorOptions

if TYPE_CHECKING:
    from mlaforge_generator.spec import Spec


class MLA:
    """The kernels of one MLA configuration. Decode is compiled at once, each of the others when it is first called."""

    def __init__(self, manifest: Manifest, backend: Cuda | Simulator) -> None:
        """Compile decode; `load` is the usual way here."""
        self.manifest = manifest
        self.backend = backend
        key = kernel_key(manifest, backend)
        self._runner = DecodeRunner(manifest, backend, key)
        loaded_decode.add(self._runner)
        self._memory = MemoryKernels(manifest, backend, key)
        loaded_memory.add(self._memory)
        self._prefill: PrefillRunner | None = None
        self._chunked: ChunkedPrefill | None = None
        if (kernel := manifest.kernels.get("prefill")) is not None:
            self._prefill = PrefillRunner(manifest, kernel, backend, key)
            loaded_prefill.add(self._prefill)
            self._chunked = ChunkedPrefill(self._prefill, self._memory, backend)
            loaded_chunked.add(self._chunked)

    def compile(self) -> None:
        """Compile all kernels now, in this process, instead of each when it is first called.

        Raises:
            CompileError: a kernel does not compile.
            ToolchainError: the compiler or its headers are missing.
        """
        self._runner.compile()
        self._memory.compile()
        if self._prefill is not None:
            self._prefill.compile()

    def decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        *,
        tensor_scale: torch.Tensor | None = None,
        causal: bool = False,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from absorbed queries to the paged latent cache.

        Works on the current stream of q's device and never waits for it. The work is divided on the device from
        `cache_seqlens`, so a captured graph may be replayed with other lengths and tables.

        Args:
            q: (b, s_q, h_q, d_qk), bf16 or fp16 as the spec's cache, bf16 if that is quantised; latent part first, then
                RoPE.
            kv_cache: (num_blocks, page_size, d_qk) or (num_blocks, page_size, h_kv, d_qk), the same dtype; of a
                quantised cache its rows, as in `append`. The last dimension contiguous, other strides multiples of 16
                bytes.
            block_table: (b, max_blocks) int32: the block of each page. Entries behind a request's last page are not
                read.
            cache_seqlens: (b,) int32: tokens of each request; those beyond the table's width are not there.
            tensor_scale: one float32: of a cache whose format has a scale beside its rows, as in `append`.
            causal: bottom-right aligned: query i of s_q sees the tokens before len - (s_q - 1) + i.
            softmax_scale: of the logits; the model's own if None.
            out: (b, s_q, h_q, d_v) to write to, of q's dtype; made if None.
            lse: (b, h_q, s_q) float32, contiguous, to write to; made if None.

        Returns:
            out, and the natural logarithm of the sum of exponentials of each row. A row that sees no token has out 0
            and lse +inf.

        Raises:
            ValueError: an argument does not fit; it says which, what it is and what it must be. Nothing was launched.
            CudaError: the driver refused the launch.
        """
        runner = self._runner
        scale = self.manifest.softmax_scale if softmax_scale is None else float(softmax_scale)
        arguments = (q, kv_cache, block_table, cache_seqlens, tensor_scale)
        if out is None and lse is None:
            made: tuple[torch.Tensor, torch.Tensor] = torch.ops.mlaforge.decode(*arguments, runner.key, causal, scale)
            return made
        if out is None:
            out = q.new_empty((*q.shape[:3], self.manifest.d_v))
        if lse is None:
            lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        torch.ops.mlaforge.decode_out(*arguments, out, lse, runner.key, causal, scale)
        return out, lse

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *,
        causal: bool = True,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from decompressed queries to decompressed keys and values, sequence by sequence.

        The rows of all sequences lie one behind the other; sequence i has rows cu_seqlens[i] to cu_seqlens[i + 1] - 1.
        Works on the current stream of q's device and never waits for it. The work is divided on the device, so a
        captured graph may be replayed with other lengths.

        Args:
            q: (total_q, heads, d_qk), d_qk = qk_nope_head_dim + qk_rope_head_dim, bf16 or fp16 as the spec's cache; the
                last dimension contiguous, other strides multiples of 16 bytes.
            k: (total_k, heads, d_qk), the same dtype and rule for strides.
            v: (total_k, heads, d_v), d_v = v_head_dim, likewise.
            cu_seqlens_q: (sequences + 1,) int32, ascending: where each sequence begins in q, and the end of the last.
            cu_seqlens_k: the same for k and v.
            causal: bottom-right aligned: query i of n sees the keys before len_k - (n - 1) + i.
            softmax_scale: of the logits; the model's own if None.
            out: (total_q, heads, d_v) to write to, of q's dtype; made if None.
            lse: (heads, total_q) float32, contiguous, to write to; made if None.

        Returns:
            out, and the natural logarithm of the sum of exponentials of each row. A row that sees no key has out 0 and
            lse +inf. Rows of q that no sequence has are not written.

        Raises:
            ValueError: an argument does not fit; it says which, what it is and what it must be. Or the spec has no
                prefill kernel. Nothing was launched.
            CudaError: the driver refused the launch.
        """
        runner = self._prefill
        if runner is None:
            raise ValueError(f"{self.manifest.name} has no prefill kernel: `mlaforge plan` says why")
        scale = self.manifest.softmax_scale if softmax_scale is None else float(softmax_scale)
        arguments = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        if out is None and lse is None:
            made: tuple[torch.Tensor, torch.Tensor] = torch.ops.mlaforge.prefill(*arguments, runner.key, causal, scale)
            return made
        if out is None:
            out = q.new_empty((*q.shape[:2], runner.d_v))
        if lse is None:
            lse = q.new_empty((*q.shape[1::-1],), dtype=torch.float32)
        torch.ops.mlaforge.prefill_out(*arguments, out, lse, runner.key, causal, scale)
        return out, lse

    @property
    def chunked(self) -> ChunkedPrefill:
        """What runs chunked prefill; ValueError if the spec has no prefill kernel."""
        if self._chunked is None:
            raise ValueError(f"{self.manifest.name} has no prefill kernel: `mlaforge plan` says why")
        return self._chunked

    def chunked_prefill(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        max_context: int,
        workspace_tokens: int,
        total_context: int | None = None,
        rounds: ContextRounds | None = None,
        tensor_scale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from new tokens to the cached ones before them, read in rounds of bounded size, and to themselves.

        What `prefill` gives for the keys and values of all tokens of each request, its context and then the new ones,
        under the causal mask. The new tokens may be in the cache already or not: they are taken from `latent`. Keys and
        values are rounded to the cache's dtype; so are the results of rounds, and again each time that two are merged.

        Works on the current stream of q's device and never waits for it. How much of whose context a round reads is
        worked out on the device, so a captured graph may be replayed with other lengths and tables within the limits.
        Beside the results it takes memory for the latents of a round; for the keys and values of a round or of the new
        tokens, whichever are more; and for a few more results, as many as the logarithm of the number of rounds.

        Args:
            q: (total_q, heads, qk_nope_head_dim + qk_rope_head_dim), bf16 or fp16 as the spec's cache: the part without
                RoPE, then the rotated one; the last dimension contiguous, other strides multiples of 16 bytes.
            latent: (total_q, d_qk) of the same dtype: the new tokens as the cache holds them, the normalised latent,
                then the rotated part.
            kv_b: (heads, qk_nope_head_dim + v_head_dim, kv_lora_rank), the same dtype: kv_b_proj's weight, of each head
                the rows that make its keys, then those that make its values.
            kv_cache: (num_blocks, page_size, d_qk) or (num_blocks, page_size, 1, d_qk), the same dtype; of a quantised
                cache as in `append`. The last dimension contiguous, other strides multiples of 16 bytes.
            block_table: (b, max_blocks) int32: the block of each page. Entries of pages without a token of the context
                are not read.
            cu_seqlens_q: (b + 1,) int32, ascending: where each request begins in q and latent, and the last one's end.
            context_lens: (b,) int32: tokens of each request that were there before the new ones.
            max_context: no request has a longer context; tokens of one that has are left out.
            workspace_tokens: of all requests together, whose context a round reads. Multiples of the prefill kernel's
                tile_kv, `mla.chunked.tile`, leave nothing unused.
            total_context: all contexts together are no longer than this, where the host knows it: then there are no
                more rounds than they need. Without it there are enough for max_context tokens of every request, and
                those that find nothing left still take time. Tokens beyond it are left out.
            rounds: what `context_rounds` gave for these lengths and limits, so that the layers of a model share it.
            tensor_scale: one float32: of a cache whose format has a scale beside its rows, as in `append`.
            softmax_scale: of the logits; the model's own if None.
            out: (total_q, heads, v_head_dim) to write to, of q's dtype; made if None.
            lse: (heads, total_q) float32, contiguous, to write to; made if None.

        Returns:
            out, and the natural logarithm of the sum of exponentials of each row. Of rows that no request has, what
            they hold means nothing.

        Raises:
            ValueError: an argument does not fit; it says which, what it is and what it must be. Or the spec has no
                prefill kernel. Nothing was launched.
            CudaError: the driver refused the launch.
        """
        runner = self.chunked
        scale = self.manifest.softmax_scale if softmax_scale is None else float(softmax_scale)
        seq_starts, cu_seqlens = (None, None) if rounds is None else rounds
        arguments = (
            *(q, latent, kv_b, kv_cache, block_table, cu_seqlens_q, context_lens),
            *(seq_starts, cu_seqlens, tensor_scale),
        )
        numbers = (runner.key, max_context, workspace_tokens, total_context, scale)
        if out is None and lse is None:
            made: tuple[torch.Tensor, torch.Tensor] = torch.ops.mlaforge.chunked_prefill(*arguments, *numbers)
            return made
        if out is None:
            out = q.new_empty((*q.shape[:2], runner.d_v))
        if lse is None:
            lse = q.new_empty((*q.shape[1::-1],), dtype=torch.float32)
        torch.ops.mlaforge.chunked_prefill_out(*arguments, out, lse, *numbers)
        return out, lse

    def context_rounds(
        self,
        context_lens: torch.Tensor,
        *,
        max_context: int,
        workspace_tokens: int,
        total_context: int | None = None,
    ) -> ContextRounds:
        """Work out, on the device, which cached tokens each round of `chunked_prefill` reads.

        It does so itself where it is not given the result, in some twenty small operations of torch; the layers of a
        model, whose lengths are the same, can share them.

        Args:
            context_lens: (b,) int32, as in `chunked_prefill`.
            max_context: likewise.
            workspace_tokens: likewise.
            total_context: likewise.

        Raises:
            ValueError: an argument does not fit; it says which, what it is and what it must be. Or the spec has no
                prefill kernel.
        """
        limits = ContextLimits(max_context, workspace_tokens, total_context)
        return context_rounds(context_lens, limits, self.chunked.tile)

    def gather(
        self,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        seq_starts: torch.Tensor | None = None,
        tensor_scale: torch.Tensor | None = None,
        total_tokens: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Copy ranges of cached tokens out of their pages, into rows that follow each other: for chunked prefill.

        Row cu_seqlens[i] + j of the result is the cached token seq_starts[i] + j of sequence i, to the bit; of a
        quantised cache what it stands for, rounded to float32 and from there to bf16. Works on the current stream and
        never waits for it: lengths, starts and tables may change between replays of a graph.

        Args:
            kv_cache: (num_blocks, page_size, d_qk) or (num_blocks, page_size, 1, d_qk), bf16 or fp16 as the spec's
                cache, or bytes of a quantised one as in `append`; the last dimension contiguous, other strides
                multiples of 16 bytes.
            block_table: (b, max_blocks) int32: the block of each page. Entries of pages without a token that is asked
                for are not read.
            cu_seqlens: (b + 1,) int32, rising: where the rows of each sequence begin, and where the last one's end.
            seq_starts: (b,) int32: the first token of each sequence that is copied; 0 if None.
            tensor_scale: one float32: of a cache whose format has a scale beside its rows, as in `append`.
            total_tokens: rows of the result, cu_seqlens[b] or more; needed if `out` is None.
            out: (total_tokens, d_qk) of the spec's element type to write to, which is the cache's, or bf16 if that is
                quantised; the last dimension contiguous. Made if None.

        Returns:
            out. Rows that no sequence has, those from cu_seqlens[b] on, are left as they are. A row whose token lies
            beyond the table's width or in a block that the cache does not have is 0.

        Raises:
            ValueError: an argument does not fit; it says which, what it is and what it must be. Nothing was launched.
            CudaError: the driver refused the launch.
        """
        arguments = (kv_cache, block_table, cu_seqlens, seq_starts, tensor_scale)
        if out is None:
            if total_tokens is None:
                raise ValueError("total_tokens is None; it must be the rows of the result where out is None, too")
            made: torch.Tensor = torch.ops.mlaforge.gather(*arguments, total_tokens, self._memory.key)
            return made
        if total_tokens is not None and total_tokens != out.shape[0]:
            raise ValueError(f"total_tokens is {total_tokens}, out has {out.shape[0]} rows; they must agree")
        torch.ops.mlaforge.gather_out(*arguments, out, self._memory.key)
        return out

    def append(
        self,
        c_kv: torch.Tensor,
        k_rope: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        positions: torch.Tensor | None = None,
        cos_sin_cache: torch.Tensor | None = None,
        interleaved: bool | None = None,
        tensor_scale: torch.Tensor | None = None,
    ) -> None:
        """Write new tokens into their slots of the paged cache: the latent, and behind it the rotary part.

        On the way the latent is normalised if there is a `norm_weight`, and the rotary part rotated if there are
        `positions`; in float32, rounded once, or quantised as mlaforge.formats says. The table of angles is the one by
        which the server rotates its queries, as FlashInfer's RoPE, SGLang and vLLM keep it, the scaling of the context
        already in it: were they worked out here anew from frequencies, keys and queries of late positions would be
        turned by angles that differ.

        Works on the current stream and never waits for it.

        Args:
            c_kv: (n, kv_lora_rank) of the spec's element type, which is the cache's, or bf16 if that is quantised; the
                last dimension contiguous, rows a multiple of 16 bytes apart: it may be a part of a projection's output.
            k_rope: (n, qk_rope_head_dim), the same; None for a model whose qk_rope_head_dim is 0.
            kv_cache: (num_blocks, page_size, d_qk) or (num_blocks, page_size, 1, d_qk) to write to; of a quantised
                cache uint8 with row_bytes, the bytes of a token, in place of d_qk (of fp8_e4m3 float8_e4m3fn as well).
                The last dimension contiguous, other strides multiples of 16 bytes.
            slot_mapping: (n,) int32 or int64: block x page_size + place in the page, each slot once. A token whose slot
                the cache does not have, such as -1, is left out.
            norm_weight: (kv_lora_rank,) of c_kv's dtype: c_kv becomes c_kv / sqrt(mean(c_kv^2) + eps) x weight.
            eps: of the normalisation.
            positions: (n,) int32 or int64: rows of cos_sin_cache. What a position that the table does not have would
                turn becomes NaN.
            cos_sin_cache: (max_position, qk_rope_head_dim) float32: cosines of a position, then as many sines.
            interleaved: whether neighbours are a pair, x_2i and x_2i+1, as in DeepSeek's models, or x_i and x_i+half.
                Each stays where it is. Needed with `positions`.
            tensor_scale: one float32, (1,) or (), on the cache's device: what fp8_e4m3 divides all elements by, and
                nvfp4 the scales of its blocks; the cache is read with the same. From 2^-100 to 2^100, which is not
                checked. `Format.tensor_scale` of mlaforge.formats chooses it. None for formats that have none.

        Raises:
            ValueError: an argument does not fit; it says which, what it is and what it must be. Nothing was launched.
            CudaError: the driver refused the launch.
        """
        if positions is not None and interleaved is None:
            raise ValueError("interleaved is None; with positions it must say which elements are a pair")
        torch.ops.mlaforge.append(
            c_kv,
            k_rope,
            kv_cache,
            slot_mapping,
            norm_weight,
            positions,
            cos_sin_cache,
            tensor_scale,
            float(eps),
            bool(interleaved),
            self._memory.key,
        )

    def merge(
        self,
        out1: torch.Tensor,
        lse1: torch.Tensor,
        out2: torch.Tensor,
        lse2: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge two partial results of the same queries over disjoint tokens to the result over all of them.

        Works on the current stream and never waits for it.

        Args:
            out1: (tokens, heads, d) or (b, s, heads, d) of the cache's dtype, d a multiple of 8 up to 1,024; the last
                dimension contiguous, other strides multiples of 16 bytes.
            lse1: (heads, tokens) or (b, heads, s) float32 with any strides: natural logarithms of the sums of
                exponentials. An infinite one, of either sign, says that there is nothing: that row of out1 counts for
                nothing, whatever it holds.
            out2: as out1.
            lse2: as lse1.
            out: of out1's shape and dtype to write to; made if None. May be out1 or out2.
            lse: of lse1's shape and dtype to write to; made if None. May be lse1 or lse2.

        Returns:
            out and lse. Where neither side has anything, out is 0 and lse -inf.

        Raises:
            ValueError: an argument does not fit; it says which, what it is and what it must be. Nothing was launched.
            CudaError: the driver refused the launch.
        """
        if out is None and lse is None:
            made: tuple[torch.Tensor, torch.Tensor] = torch.ops.mlaforge.merge(out1, lse1, out2, lse2, self._memory.key)
            return made
        if out is None:
            out = out1.new_empty(out1.shape)
        if lse is None:
            lse = lse1.new_empty(lse1.shape)
        torch.ops.mlaforge.merge_out(out1, lse1, out2, lse2, out, lse, self._memory.key)
        return out, lse


def load(spec: str | os.PathLike[str], *, device: str = "cuda", simulator: SimulatorOptions | None = None) -> MLA:
    """Compile the kernels of a spec, or take them from the cache.

    Args:
        spec: a folder made by `mlaforge generate`, a YAML file, or the name of a shipped spec. A folder needs neither
            the generator nor its libraries.
        device: "cuda", or "sim": the same kernels' text on the CPU, on CPU tensors, under a machine that looks for
            races and deadlocks.
        simulator: how that machine runs.

    Raises:
        ValueError: an unknown device, or a name that is neither a file's nor a shipped spec's.
        SpecError: the YAML has faults (mlaforge_generator.errors).
        ManifestError: the folder is none of ours.
        CompileError: a kernel does not compile.
        ToolchainError: the compiler or its headers are missing.
    """
    if device not in ("cuda", "sim"):
        raise ValueError(f"device is {device!r}; it must be 'cuda' or 'sim'")
    path = Path(spec)
    manifest = read_manifest(path if os.path.isdir(path) else generate_yaml(os.fspath(spec)))
    return MLA(manifest, Cuda() if device == "cuda" else Simulator(simulator or SimulatorOptions()))


# What follows is where the runtime reaches for the generator, and only for a user who passes no folder.


def generate_yaml(spec: str) -> Path:
    """Render a YAML file, or a shipped spec by its name, into the cache directory; give the folder.

    Raises:
        ValueError: a name that is neither a file's nor a shipped spec's.
        SpecError: the YAML has faults.
    """
    from mlaforge_generator.resources import find_spec, why_unknown
    from mlaforge_generator.spec import load_spec

    path = find_spec(spec)
    if reason := why_unknown(spec, path):
        raise ValueError(reason)
    return _generate(load_spec(path))


def generate_tree(tree: dict[str, Any]) -> Path:
    """Do the same with a spec that is plain data."""
    from mlaforge_generator.spec import check_spec

    return _generate(check_spec(tree))


def _generate(spec: Spec) -> Path:
    from mlaforge_generator.plan import make_plan
    from mlaforge_generator.render import render

    return materialise(spec.name, render(make_plan(spec)))
