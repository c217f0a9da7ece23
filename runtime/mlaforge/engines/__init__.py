"""Backends with which engines that serve models run these kernels; the engines load them through their entry points.

vLLM calls `register_vllm` in each of its processes, SGLang `register_sglang`. Neither engine is needed to import this
package, nor is it imported with it: an engine that is not asked for these kernels loads nothing of them.
"""

from __future__ import annotations

NAME = "mlaforge"
"""Of the backend for SGLang; vLLM has one place for backends from elsewhere, and calls it CUSTOM."""


def register_vllm() -> None:
    """Make the backend of attention, and that of prefill, known to vLLM under the name CUSTOM.

    A name of our own would be known only where this function has been called; vLLM also sends its configuration, names
    of backends included, to processes that have not come to that yet. May be called more than once.

    Raises:
        ImportError: vLLM is not installed, or has no place for such backends.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.vllm.MLAForgeBackend")
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )
    except ImportError:
        return  # releases that choose the kernels of prefill themselves
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, f"{__name__}.vllm.MLAForgePrefillBackend")


def register_sglang() -> None:
    """Make the backend known to SGLang as `mlaforge`. May be called more than once.

    Raises:
        ImportError: SGLang is not installed, or has no place for such backends.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_make_sglang)


def _make_sglang(model_runner: object) -> object:
    from .sglang import MLAForgeAttnBackend

    return MLAForgeAttnBackend(model_runner)
