"""Requirements, refusals and declarations. Generated over the registry: a new backend is covered without new code."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from turboquant_rocm import Code, LayerSpec, Preset, SpecError, Target
from turboquant_rocm.backends import Backend, backends
from turboquant_rocm.eligibility import (
    AtMost,
    HasRotation,
    MultipleOf,
    OneOf,
    Package,
    Refusal,
    Request,
    Requirement,
    When,
    Without,
    refusals,
)
from turboquant_rocm.packages import Environment
from turboquant_rocm.prefill import ROUTES, prefill_route
from turboquant_rocm.target import targets

PRESET = Preset("some", 4, 4, True)
REQUEST = Request(LayerSpec(0, 8, 1, 128), Target("amd", "gfx950"), PRESET, 16)


def satisfying(requires: tuple[Requirement, ...]) -> Request:
    """A request that meets every requirement, found by asking each what would pass."""
    request = REQUEST
    for _ in range(20):
        failed = [r for r in requires if r.check(request) is not None]
        if not failed:
            return request
        value = next(iter(failed[0].passing(request)))
        request = request.with_value(failed[0].code, value)
    raise AssertionError(f"no request meets {requires}")


DECLARED = {b.name: b.requires for b in backends()} | {f"prefill {r.name}": r.requires for r in ROUTES}
EACH = [pytest.param(n, i, id=f"{n}-{i}-{r.code}") for n, rs in DECLARED.items() for i, r in enumerate(rs)]


@pytest.mark.parametrize(("name", "index"), EACH)
def test_breaking_one_requirement_gives_exactly_its_code(name: str, index: int):
    requires = DECLARED[name]
    request = satisfying(requires)
    broken = [refusals(requires, bad) for bad in requires[index].failing(request)]
    assert broken, "failing() offers nothing"
    alone = [why for why in broken if {refusal.code for refusal in why} == {requires[index].code}]
    assert alone, f"{requires[index]} cannot fail alone: {[list(map(str, why)) for why in broken]}"
    for refusal in alone[0]:
        assert str(refusal).startswith(f"{refusal.code}=")
        assert "(wants " in str(refusal)
        assert refusal.wants


@pytest.mark.parametrize("name", DECLARED)
def test_breaking_five_gives_five(name: str):
    requires = DECLARED[name]
    request = satisfying(requires)
    codes = list(dict.fromkeys(r.code for r in requires))
    wanted = min(5, len(codes))
    for chosen in itertools.combinations(requires, wanted):
        if len({r.code for r in chosen}) < wanted:
            continue
        bad = request
        for requirement in chosen:
            bad = next(
                (
                    b
                    for b in requirement.failing(bad)
                    if {r.code for r in refusals(requires, b)}
                    == {r.code for r in refusals(requires, bad)} | {requirement.code}
                ),
                bad,
            )
        found = refusals(requires, bad)
        if {r.code for r in found} == {r.code for r in chosen}:
            assert len(found) >= wanted
            return
    raise AssertionError(f"no {wanted} requirements of {name} fail together")


@pytest.mark.parametrize("declared", backends(), ids=lambda b: b.name)
def test_declarations_say_what_they_want(declared: Backend):
    assert declared.layout in ("soa", "aos", "any")
    assert declared.description
    for requirement in declared.requires:
        assert requirement.explain()
    if declared.automatic:
        known = set(targets())
        for requirement in declared.requires:
            if isinstance(requirement, OneOf) and requirement.code is Code.ARCH:
                assert set(requirement.values) <= known, "add the arch to configs/targets.yaml"
            if isinstance(requirement, Package):
                assert requirement.arches, "a package must be probed on its own architectures only"


@pytest.mark.parametrize("declared", backends(), ids=lambda b: b.name)
def test_ready_means_that_the_kernels_are_there(declared: Backend):
    from importlib import resources

    module = declared.ops.partition(":")[0]
    folder = resources.files("turboquant_rocm.backends")
    path = folder.joinpath(*module.split("."))
    there = path.is_dir() or path.with_name(path.name + ".py").is_file()  # type: ignore[attr-defined]
    assert there or not declared.ready, f"{declared.name} is ready, and backends/{module} is missing"
    if not declared.ready:
        with pytest.raises(SpecError):
            declared.load_ops()


def test_every_code_that_has_a_value_can_be_set():
    for code in Code:
        try:
            value = REQUEST.get(code)
        except KeyError:
            continue
        assert REQUEST.with_value(code, value).get(code) == value


@pytest.mark.parametrize("block_size", [0, -1, True, "16", 16.0, None])
def test_request_refuses_block_sizes_that_are_none(block_size: object):
    with pytest.raises(SpecError, match="block_size"):
        replace(REQUEST, block_size=block_size)


@pytest.mark.parametrize(
    ("requirement", "text"),
    [
        (OneOf(Code.GQA_RATIO, (6, 16)), "gqa_ratio=8 (wants one of 6, 16)"),
        (OneOf(Code.HEAD_SIZE, (64,)), "head_size=128 (wants 64)"),
        (MultipleOf(Code.BLOCK_SIZE, 32), "block_size=16 (wants a multiple of 32)"),
        (AtMost(Code.GQA_RATIO, 4), "gqa_ratio=8 (wants 1 to 4)"),
        (OneOf(Code.HEAD_SIZE, (64,), hint="see the docs"), "head_size=128 (wants 64): see the docs"),
        (When(OneOf(Code.KEY_BITS, (4,)), AtMost(Code.HEAD_SIZE, 64)), "head_size=128 (wants 1 to 64)"),
    ],
)
def test_refusals_read_like_this(requirement: Requirement, text: str):
    assert str(requirement.check(REQUEST)) == text


def test_features_that_are_absent_are_no_refusal():
    for code in (Code.SINKS, Code.WINDOW, Code.SOFT_CAP, Code.POSITION_BIAS):
        assert Without(code).check(REQUEST) is None
    with_sinks = REQUEST.with_value(Code.SINKS, True)
    assert Without(Code.SINKS).check(with_sinks) == Refusal(Code.SINKS, True, "none")
    assert str(Without(Code.SINKS).check(with_sinks)) == "sinks=yes (wants none)"


def test_when_asks_only_where_its_condition_holds():
    fp8 = When(OneOf(Code.KEY_BITS, (8,)), OneOf(Code.ARCH, ("sm_90",)))
    assert fp8.check(REQUEST) is None
    assert fp8.check(REQUEST.with_value(Code.KEY_BITS, 8)) is not None
    assert any(fp8.check(bad) for bad in fp8.failing(REQUEST))


def test_rotation_is_asked_of_rotated_keys_only():
    odd = REQUEST.with_value(Code.HEAD_SIZE, 72)
    assert HasRotation().check(odd) is not None
    assert HasRotation().check(odd.with_value(Code.KEY_BITS, 8)) is None
    for size in HasRotation().passing(odd):
        assert HasRotation().check(odd.with_value(Code.HEAD_SIZE, size)) is None


def test_packages_are_taken_for_granted_elsewhere_and_probed_here():
    wants = Package(Code.PACKAGE, name="no_such_package_here", version=">=1")
    assert wants.check(REQUEST) is None
    here = replace(REQUEST, target=replace(REQUEST.target, local=True))
    refusal = wants.check(here)
    assert refusal is not None
    assert refusal.got == "not installed"
    assert refusal.wants == "no_such_package_here>=1"
    assert wants.check(replace(here, environment=Environment().with_("no_such_package_here"))) is None
    assert (
        wants.check(replace(REQUEST, environment=Environment().without("no_such_package_here"))) is not None
    )


def test_arch_gate_comes_before_any_probe(monkeypatch: pytest.MonkeyPatch):
    from turboquant_rocm import packages

    monkeypatch.setattr(packages, "probe", lambda *_: pytest.fail("probed"))
    here = replace(REQUEST, target=Target("amd", "gfx942", local=True))
    assert Package(Code.PACKAGE, name="flydsl", arches=("gfx950",)).check(here) is None


@pytest.mark.parametrize(("size", "passes"), [(15, False), (16, True), (64, True), (65, False)])
def test_at_most_has_two_ends(size: int, passes: bool):
    requirement = AtMost(Code.BLOCK_SIZE, limit=64, low=16)
    refusal = requirement.check(replace(REQUEST, block_size=size))
    assert (refusal is None) is passes
    if refusal is not None:
        assert str(refusal) == f"block_size={size} (wants 16 to 64)"


@pytest.mark.parametrize(
    ("size", "route"),
    [(24, "torch_sdpa"), (32, "triton_unified"), (512, "triton_unified"), (520, "torch_sdpa")],
)
def test_head_sizes_that_flash_attention_has_no_kernel_for(size: int, route: str):
    request = Request(LayerSpec(0, 8, 1, size), Target("amd", "gfx1100"), PRESET, 16)
    assert prefill_route(request).route == route
