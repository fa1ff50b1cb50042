"""LayerSpec refuses what contradicts itself. Ranges of single fields are tested where descriptions set them."""

from __future__ import annotations

import pytest

from turboquant_rocm import AttentionKind, LayerSpec, SpecError, Target, get_preset
from turboquant_rocm.eligibility import Code, Request


@pytest.mark.parametrize("kind", [k for k in AttentionKind if k not in ("sliding", "mla")])
def test_a_window_is_refused_where_no_window_slides(kind: AttentionKind):
    """A full layer with a window would be served as a sliding one by kernels, and priced as a full one by reports."""
    chunk = 64 if kind is AttentionKind.CHUNKED else None
    LayerSpec(0, 8, 2, 64, kind=kind, chunk=chunk)
    with pytest.raises(SpecError, match=rf"window=3 \(wants none for a {kind} layer"):
        LayerSpec(0, 8, 2, 64, kind=kind, chunk=chunk, window=3)


def test_layers_that_slide_have_windows():
    assert LayerSpec(0, 8, 2, 64, kind="sliding", window=3).window == 3
    assert LayerSpec(0, 8, 1, 576, kind="mla", value_head_size=512, window=3).window == 3
    with pytest.raises(SpecError, match="window=None"):
        LayerSpec(0, 8, 2, 64, kind="sliding")


@pytest.mark.parametrize("kind", [k for k in AttentionKind if k != "sliding"])
def test_counterfactuals_stay_consistent(kind: AttentionKind):
    """What explain tries ("as a full layer", "with a window") are layers that there can be."""
    sliding = LayerSpec(0, 8, 2, 64, kind="sliding", window=128)
    request = Request(sliding, Target("amd", "gfx950"), get_preset("4bit_nc"), 16)
    other = request.with_value(Code.LAYER_KIND, kind).layer
    assert other.window == (128 if kind == "mla" else None)
    windowed = Request(other, request.target, request.preset, 16).with_value(Code.WINDOW, 64).layer
    assert windowed.kind == ("mla" if kind == "mla" else "sliding")
    assert windowed.window == 64
