"""The calls of mlaforge.flash_mla for the judges of mlaforge.verify."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import torch

from mlaforge import flash_mla
from mlaforge.api import generate_tree
from mlaforge.flash_mla import Family
from mlaforge.manifest import Manifest, read_manifest

Form = Literal["old", "new"]
FORMS: tuple[Form, ...] = ("old", "new")


class DropIn:
    """Decodes as FlashMLA's callers do, in one of its forms, and leaves the softmax scale to FlashMLA's default."""

    def __init__(self, family: Family, form: Form) -> None:
        manifest = read_manifest(Path(generate_tree(family.tree())))
        self.manifest: Manifest = dataclasses.replace(manifest, softmax_scale=family.d_qk**-0.5)
        self.form = form

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
        assert out is not None and lse is not None
        if self.form == "old":
            h_kv = kv_cache.shape[2]
            made = flash_mla.get_mla_metadata(cache_seqlens, q.shape[1] * q.shape[2] // h_kv, h_kv)
        else:
            made = flash_mla.get_mla_metadata()
        results = flash_mla.flash_mla_with_kvcache(
            q, kv_cache, block_table, cache_seqlens, self.manifest.d_v, *made, softmax_scale, causal
        )
        for result, into in zip(results, (out, lse), strict=True):
            assert result.shape == into.shape and result.dtype == into.dtype
            into.copy_(result)
        return out, lse
