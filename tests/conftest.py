"""Hypothesis profiles, and the rule for tests that need a Hopper GPU."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("dev", max_examples=50, deadline=None)
# Derandomized, so that a pull request can't fail by bad luck; the blob replays a failure on another machine.
settings.register_profile("ci", max_examples=200, derandomize=True, print_blob=True, database=None, deadline=None)
settings.register_profile("long", max_examples=2000, print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


# Last, so that tests deselected with `-m` are gone and don't cause the import of torch.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu where there is no such GPU; torch is imported only if anything is marked."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _why_no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}; the kernels need 9.0"
    return None
