"""Measuring a step on ranks: bytes equal the formulas, memory the closed form, and every variant trains the same."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from test_train import tiny

from moe_lab import launch
from moe_lab.bench import data_parallel
from moe_lab.errors import ConfigError, RankError
from moe_lab.fields import to_dict
from moe_lab.model import build

CONFIG = tiny(eval_every=0, sequences_per_step=8, microbatch_sequences=1, sequence_length=8)
WAYS = {
    "ddp": [],
    "replicated": ["shard_optimizer=false"],
    "fsdp": ["data_parallel=fsdp"],
    "hsdp": ["data_parallel=fsdp", "fsdp_shard=2"],
}
MICROBATCHES = (1, 2)


def variant(way: str, microbatches: int, *more: str) -> list[str]:
    return [*WAYS[way], f"sequences_per_step={4 * microbatches}", *more]


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    variants = [variant(way, m) for m in MICROBATCHES for way in WAYS]
    variants += [variant(way, 2, "precision=bf16") for way in WAYS]
    results = launch.run(
        data_parallel.steps, ranks=4, timeout_s=200, show=False, config=to_dict(CONFIG), variants=variants, steps=2,
        warmup=2,
    )  # fmt: skip
    return results[0]["variants"]


def of(measured: list[dict[str, Any]], way: str, microbatches: int, bf16: bool = False) -> dict[str, Any]:
    row = 2 if bf16 else MICROBATCHES.index(microbatches)
    return measured[4 * row + list(WAYS).index(way)]


def wire(way: str, parameters: int, microbatches: int, weight_bytes: int) -> float:
    name, shards = ("fsdp", 2) if way == "hsdp" else (way, 0)
    return data_parallel.wire_bytes(name, parameters, 4, microbatches, weight_bytes, shards)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_sent_equal_the_formulas(measured, way):
    parameters = sum(p.numel() for p in build(CONFIG.model, "meta").parameters())
    padding = {"ddp": 1.12, "replicated": 1.03, "fsdp": 1.01, "hsdp": 1.01}[way]
    for microbatches, bf16 in ((1, False), (2, False), (2, True)):
        entry = of(measured, way, microbatches, bf16)
        assert entry["parameters"] == parameters
        assert entry["microbatches"] == microbatches
        assert entry["sent"]["unknown"] == {}
        expected = wire(way, parameters, microbatches, 2 if bf16 else 4)
        assert expected <= entry["sent"]["bytes"] * 1.0001 <= expected * padding
        assert 0 < entry["sent"]["other"] < 3000


def test_ddp_sends_once_a_step_and_fsdp_once_a_microbatch(measured):
    for way, growth in (("ddp", 1), ("replicated", 1), ("fsdp", 2), ("hsdp", 2)):
        one, two = of(measured, way, 1)["sent"], of(measured, way, 2)["sent"]
        assert two["bytes"] == growth * one["bytes"]
        assert {k: n for k, (n, _) in two["kinds"].items()} == {
            k: growth * n for k, (n, _) in one["kinds"].items()
        }
    assert set(of(measured, "hsdp", 1)["sent"]["kinds"]) == {"all_gather", "reduce_scatter", "all_reduce"}


def test_memory_by_kind_is_the_closed_form(measured):
    for way, weights, gradients, optimizer in (
        ("ddp", 2, 4, 12 / 4), ("replicated", 2, 4, 12), ("fsdp", 4 / 4, 4 / 4, 8 / 4), ("hsdp", 4 / 2, 4 / 2, 8 / 2),
    ):  # fmt: skip
        entry = of(measured, way, 2, bf16=True)
        held, count = entry["memory"], entry["parameters"]
        assert set(held) == set(data_parallel.KINDS)
        for value, expected in (
            (held["weights"], weights), (held["gradients"], gradients), (held["masters"] + held["moments"], optimizer),
        ):  # fmt: skip
            assert expected * count <= value <= 1.12 * expected * count, way


def test_every_way_trains_the_same_and_times_are_kept(measured):
    for microbatches in MICROBATCHES:
        first = of(measured, "ddp", microbatches)
        assert len(first["losses"]) == 4
        assert first["median"] == statistics.median(first["seconds"])
        assert len(first["seconds"]) == 2
        assert first["tokens_per_second"] == pytest.approx(4 * microbatches * 8 / first["median"])
        for way in WAYS:
            assert of(measured, way, microbatches)["losses"] == pytest.approx(first["losses"], rel=1e-4)


def test_variants_one_after_the_other_in_this_process():
    found = data_parallel.steps(to_dict(CONFIG), [[], ["steps=7"]], steps=1, alternate=False)["variants"]
    assert found[0]["losses"] == found[1]["losses"]
    assert found[0]["sent"]["bytes"] == 0


def test_wire_bytes():
    assert data_parallel.wire_bytes("ddp", 100, 4, 7) == 6 * 100 * 3 / 4
    assert data_parallel.wire_bytes("replicated", 100, 4, 7) == 8 * 100 * 3 / 4
    assert data_parallel.wire_bytes("fsdp", 100, 4, 7) == 7 * 8 * 100 * 3 / 4
    assert data_parallel.wire_bytes("fsdp", 100, 4, 1, 2, 4) == data_parallel.wire_bytes("fsdp", 100, 4, 1)
    # One shard a copy is replication, reduced every microbatch; nothing is sent by one rank alone.
    assert data_parallel.wire_bytes("fsdp", 100, 4, 3, 2, 1) == 3 * 8 * 100 * 3 / 4
    assert data_parallel.wire_bytes("ddp", 100, 1, 3) == data_parallel.wire_bytes("fsdp", 100, 1, 3) == 0
    with pytest.raises(ConfigError, match="way is 'zero'"):
        data_parallel.wire_bytes("zero", 1, 1, 1)
    with pytest.raises(ConfigError, match="shards is 3, which does not divide 4"):
        data_parallel.wire_bytes("fsdp", 1, 4, 1, shards=3)


def test_what_cannot_run_is_refused_before_the_first_step():
    with pytest.raises(ConfigError, match="steps is 0 and warmup 1"):
        data_parallel.steps(to_dict(CONFIG), [[]], steps=0)
    with pytest.raises(ConfigError, match="needs at least 2, but this is 1"):
        data_parallel.steps(to_dict(CONFIG), [[], ["data_parallel=fsdp"]], steps=1)
    with pytest.raises(RankError, match="2 data-parallel ranks do not share evenly"):
        launch.run(
            data_parallel.steps, ranks=2, timeout_s=60, show=False, config=to_dict(CONFIG),
            variants=[["sequences_per_step=3"]], steps=1,
        )  # fmt: skip
