"""The reference of an attention layer is transformers' layer, of every model and to the last digits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is what the layer is compared with")

from attention_models import MODELS, Theirs
from mlaforge.attention_config import AttentionConfig
from mlaforge.attention_reference import ReferenceAttention
from test_verify import one_thread as one_thread

pytestmark = pytest.mark.usefixtures("one_thread")

# float64 of two orders of summation over at most 48 terms; float32's own rounding of the layer that is compared.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_reference_is_transformers_layer(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]
    config = model.config()
    layer = model.layer(config)
    weights = {key: tensor.double() for key, tensor in layer.state_dict().items()}
    ours = ReferenceAttention(AttentionConfig.from_hf(config), weights)
    theirs = Theirs(model, config, layer, dtype)
    hidden = torch.randn(33, config.hidden_size, generator=torch.Generator().manual_seed(1)).double()
    latents = None
    # A prompt, a chunk that continues it, then token by token.
    for piece in hidden.split([17, 9, 1, 1, 1, 1, 1, 1, 1]):
        want = theirs(piece)
        got, latents = ours(piece, latents)
        assert got.dtype == torch.float64 and got.shape == piece.shape
        torch.testing.assert_close(got, want.double(), rtol=0, atol=TOLERANCE[dtype] * float(want.abs().max()))
