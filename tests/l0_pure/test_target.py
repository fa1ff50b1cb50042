"""The table of targets, and what this machine's device becomes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from turboquant_rocm import SpecError, Target
from turboquant_rocm.target import detect, devices, get_target, target_names, targets

NEEDED = {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_89", "sm_90", "sm_100", "cpu"}


def test_all_targets_have_the_facts_that_checks_need():
    assert set(target_names()) >= NEEDED
    for arch, target in targets().items():
        assert target.arch == arch
        assert not target.local
        if arch == "cpu":
            continue
        assert target.wave_size == (64 if arch in ("gfx90a", "gfx942", "gfx950") else 32)
        assert target.lds_bytes >= 65536
        assert target.fp8_format in (None, "e4m3fn", "e4m3fnuz")
        assert target.compute_units
        assert target.memory_gib
        assert target.mfma
    assert targets()["gfx942"].fp8_format == "e4m3fnuz"
    assert targets()["gfx950"].lds_bytes == 160 * 1024


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("gfx942", "gfx942"),
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("SM90", "sm_90"),
        ("sm_90a", "sm_90"),
        ("cpu", "cpu"),
    ],
)
def test_spellings(text: str, arch: str):
    assert get_target(text).arch == arch


@pytest.mark.parametrize("text", ["", "gfx1", "auto", "9.0", "mi300x", "sm_9"])
def test_unknown_targets_name_the_known_ones(text: str):
    with pytest.raises(SpecError) as caught:
        get_target(text)
    assert caught.value.field == "target"
    assert "gfx942" in caught.value.wants


def test_a_target_passes_through():
    mine = Target("amd", "gfx9999")
    assert get_target(mine) is mine


def fake_torch(monkeypatch: pytest.MonkeyPatch, hip: str | None, found: list[SimpleNamespace]):
    cuda = SimpleNamespace(
        is_available=lambda: bool(found),
        device_count=lambda: len(found),
        get_device_properties=lambda index: found[index],
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip)))


def card(name: str, major: int, minor: int, gfx: str = "") -> SimpleNamespace:
    return SimpleNamespace(name=name, major=major, minor=minor, total_memory=192 << 30, gcnArchName=gfx)


def test_rocm_is_told_from_its_arch_string_not_its_capability(monkeypatch: pytest.MonkeyPatch):
    fake_torch(
        monkeypatch,
        "7.0",
        [card("RX 7900", 11, 0, "gfx1100"), card("MI300X", 9, 4, "gfx942:sramecc+:xnack-")],
    )
    assert [d.arch for d in devices()] == ["gfx1100", "gfx942"]
    target = detect(1)
    assert (target.vendor, target.arch, target.local, target.name) == ("amd", "gfx942", True, "MI300X")
    assert target == get_target("gfx942")  # the facts are the same; locality is no part of equality
    with pytest.raises(SpecError, match="device"):
        detect(2)


def test_cuda(monkeypatch: pytest.MonkeyPatch):
    fake_torch(monkeypatch, None, [card("NVIDIA H200", 9, 0)])
    assert get_target("local").arch == "sm_90"
    fake_torch(monkeypatch, None, [card("new", 13, 7)])
    unknown = detect()
    assert (unknown.vendor, unknown.arch, unknown.local) == ("nvidia", "sm_137", True)


def test_no_gpu_and_no_torch(monkeypatch: pytest.MonkeyPatch):
    fake_torch(monkeypatch, None, [])
    assert detect().arch == "cpu"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert devices() == ()
    assert detect().local
