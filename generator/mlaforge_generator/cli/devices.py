"""What a command that runs kernels needs: torch and a Hopper GPU."""

from __future__ import annotations

import sys

import click

from .group import ToolchainFailure
from .output import status


def require_torch() -> None:
    """Fail if torch can't be imported, which takes seconds."""
    if sys.modules.get("torch"):
        return
    try:
        with status("importing torch"):
            import torch  # noqa: F401
    except ImportError as error:
        raise ToolchainFailure(f"torch can't be imported: {error}") from None


def why_no_hopper(device: str) -> str | None:
    """Say why kernels can't run, None if they can."""
    require_torch()
    import torch

    try:
        kind = torch.device(device)
    except RuntimeError:
        kind = None
    if kind is None or kind.type != "cuda":
        raise click.BadParameter(f"{device!r} is not cuda or cuda:N", param_hint="--device")
    if not torch.cuda.is_available():
        return "no CUDA GPU found"
    if (kind.index or 0) >= torch.cuda.device_count():
        return f"no {device}: there are {torch.cuda.device_count()} CUDA GPUs"
    capability = torch.cuda.get_device_capability(kind)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(kind)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, not Hopper's 9.0"
    return None
