"""Layouts, what each GPU holds, and the picture of it."""

from __future__ import annotations

import pytest

from moe_lab import plan, presets
from moe_lab.errors import ConfigError
from moe_lab.viz import gpus

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "ranks", "ep", "pp"),
    [
        ("laptop", 4, 4, 1),
        ("bench-8l", 8, 8, 1),
        ("tiny-64e", 16, 1, 1),
        ("large-128e", 128, 8, 4),
        ("ultra-256e", 512, 32, 8),
    ],
)
def test_every_parameter_is_held_once_by_a_replica(name: str, ranks: int, ep: int, pp: int) -> None:
    model = presets.get(name).model
    held = plan.holdings(model, ranks, ep, pp)
    assert [h.gpu for h in held] == list(range(ranks))
    first = [h for h in held if h.edp == 0]
    dense = sum(h.dense_parameters for h in first if h.ep == 0)
    experts = sum(h.expert_parameters for h in first)
    assert dense + experts == plan.count_parameters(model).total
    assert sorted(layer for h in first if h.ep == 0 for layer in h.layers) == list(range(model.n_layers))
    for stage in range(pp):
        shards = [e for h in first if h.stage == stage for e in h.experts]
        assert shards == list(range(model.moe.n_experts))


def test_training_state_of_published_layouts() -> None:
    def gib(experts: int, ranks: int, ep: int) -> float:
        return plan.holdings(presets.get("bench-8l", experts=experts).model, ranks, ep)[0].state / GIB

    # 6 + 12 / dp bytes a dense parameter, 6 + 12 / edp an expert's; the report's 62.2 GiB and its capacity sweep.
    assert gib(32, 4, 4) == pytest.approx(62.02, abs=0.01)
    assert gib(128, 8, 8) == pytest.approx(106.8, abs=0.05)
    assert gib(128, 8, 1) == pytest.approx(327.3, abs=0.05)


@pytest.mark.parametrize(
    ("ranks", "ep", "pp", "words"),
    [
        (8, 3, 1, "3 does not divide the 8 GPUs"), (8, 1, 3, "3 pipeline stages do not divide 8"), (0, 1, 1, "GPUs is 0"),
        (16, 1, 16, "16 pipeline stages are more than the 8 layers"), (512, 128, 1, "128 does not divide 64 experts"),
    ],
)  # fmt: skip
def test_impossible_layouts(ranks: int, ep: int, pp: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan.holdings(presets.get("bench-8l").model, ranks, ep, pp)


def test_split_and_change_of_experts() -> None:
    assert plan.split_layers(7, 3) == [range(0, 3), range(3, 5), range(5, 7)]
    config = presets.get("bench-8l").model
    more = plan.with_experts(config, 128)
    assert (
        plan.count_parameters(more).active - plan.count_parameters(config).active == 7 * 4096 * 64
    )  # the routers
    with pytest.raises(ConfigError, match="no experts"):
        plan.with_experts(presets.get("dense-8l").model, 8)


def test_the_picture_and_its_sentence() -> None:
    held = plan.holdings(presets.get("large-128e").model, 128, 8, 4)
    text = gpus.describe(held, 268.6)
    assert "128 GPUs = 4 pipeline stages x 4 expert replicas x 8 expert-parallel ranks" in text
    assert "fits in 269 GiB" in text
    assert "does not fit in 40 GiB" in gpus.describe(held, 40)
    figure = gpus.draw(held, 268.6, "large-128e")
    assert len(figure.axes[0].patches) == 128
    assert any(figure.axes[0].get_title(where).startswith("large-128e") for where in ("left", "center"))
    single = gpus.draw(plan.holdings(presets.get("dense-8l").model, 1), 141, "one")
    assert len(single.axes[0].patches) == 1


def test_sliders_say_what_is_impossible() -> None:
    box = gpus.ui({"bench-8l": presets.get("bench-8l").model}, gpus=8, ep=8, pp=1)
    controls, line, image = box.children
    count, ep = controls.children[1], controls.children[2]
    assert "8 GPUs = 1 pipeline stage x 1 expert replica x 8 expert-parallel ranks" in line.value
    ep.value = 16
    assert (
        "Not possible: expert-parallel degree 16 does not divide the 8 GPUs of a pipeline stage."
        in line.value
    )
    assert image.layout.visibility == "hidden"
    count.value = 16
    assert "16 expert-parallel ranks" in line.value
    assert image.layout.visibility == "visible"
