"""Parameter counts and FLOPs against the published table of Olmo-core 3, from the real modules on the meta device."""

from __future__ import annotations

import pytest

from moe_lab import model, presets
from moe_lab.plan import count_parameters

PUBLISHED = {  # active, total
    "tiny-64e": (1_587_552_256, 12_912_173_056),
    "tiny-64e-ep8": (1_587_552_256, 12_912_173_056),
    "small-64e": (4_294_095_872, 40_863_183_872),
    "small-64e-16mi": (4_294_095_872, 40_863_183_872),
    "medium-64e": (7_371_919_104, 70_223_564_544),
    "medium-96e": (7_375_556_352, 103_748_079_360),
    "medium-128e": (7_379_193_600, 137_272_594_176),
    "large-128e": (15_138_557_696, 295_989_153_536),
    "large-128e-pp8": (15_138_557_696, 295_989_153_536),
    "ultra-128e": (58_358_763_264, 1_200_484_519_680),
    "ultra-256e": (58_406_735_616, 2_379_501_014_784),
    "bench-8l": (3_172_804_608, 24_312_096_768),
}
GIGA = {  # published with four decimals, in 1e9: active, total
    ("bench-8l", 8): (3.171, 4.580), ("bench-8l", 32): (3.172, 13.037), ("bench-8l", 48): (3.172, 18.674),
    ("bench-8l", 128): (3.175, 46.863), ("profile-8l", 128): (1.3550, 9.6125), ("mxfp8-6l", 128): (2.2844, 17.3839),
    ("gerrymander-8l", 64): (0.8985, 6.1834), ("gerrymander-10l", 64): (1.0204, 7.8152),
}  # fmt: skip
GFLOPS = {  # training GFLOP a token at sequence length 8192
    "tiny-64e": 9.9022, "small-64e": 29.054, "medium-64e": 50.232, "medium-96e": 50.253, "medium-128e": 50.275,
    "large-128e": 100.190, "ultra-128e": 371.814, "ultra-256e": 372.102, "bench-8l": 18.181, "mxfp8-6l": 12.448,
    "profile-8l": 7.595, "gerrymander-8l": 4.963, "gerrymander-10l": 5.896,
}  # fmt: skip


@pytest.mark.parametrize("name", presets.names())
def test_closed_form_equals_the_modules(name: str) -> None:
    config = presets.get(name).model
    built = model.build(config, "meta")
    counts = count_parameters(config)
    assert sum(p.numel() for p in built.parameters()) == counts.total
    routed = sum(p.numel() for n, p in built.named_parameters() if ".experts." in n)
    assert routed == counts.routed
    if name in PUBLISHED:
        assert (counts.active, counts.total) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "experts"), GIGA)
def test_rows_published_in_billions(name: str, experts: int) -> None:
    counts = count_parameters(presets.get(name, experts=experts).model)
    active, total = GIGA[name, experts]
    digits = 3 if name == "bench-8l" else 4
    assert (round(counts.active / 1e9, digits), round(counts.total / 1e9, digits)) == (active, total)


def test_variants_of_the_benchmark_rows() -> None:
    no_shared = count_parameters(presets.get("profile-8l", shared_hidden=0, dense_hidden=10240).model)
    assert (round(no_shared.active / 1e9, 4), round(no_shared.total / 1e9, 4)) == (1.2764, 9.5339)
    shared = count_parameters(presets.get("gerrymander-10l", shared_hidden=2560, dense_hidden=10752).model)
    assert (shared.active, shared.total) == (1_177_729_536, 7_972_502_016)


@pytest.mark.parametrize("name", GFLOPS)
def test_flops_a_token(name: str) -> None:
    flops = count_parameters(presets.get(name).model).flops_per_token(8192)
    assert flops / 1e9 == pytest.approx(GFLOPS[name], rel=6e-5)
