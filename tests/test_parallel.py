"""Data parallelism: DDP with a sharded optimizer and the FSDP baseline, equal to one process; bytes in memory and on the wire."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import parallel_targets
import pytest
import torch
from test_train import tiny

from moe_lab import launch
from moe_lab.config import OptimConfig, ParallelConfig
from moe_lab.errors import ConfigError
from moe_lab.fields import to_dict
from moe_lab.model import build, cross_entropy
from moe_lab.ops.adamw import Hyper, adamw, reference
from moe_lab.ops.gradient import GradientSlot, set_slot
from moe_lab.ops.linear import linear
from moe_lab.parallel import Mesh, ShardedDataParallel, gradient_of, rank_grid, weight_decay_of
from moe_lab.parallel.optimizer import SpikeGuard
from moe_lab.train import Trainer

EIGHT = {"sequences_per_step": 16, "microbatch_sequences": 2, "eval_every": 0, "steps": 20}
DDP, REPLICATED, FSDP = "ddp", "shard_optimizer=false", "data_parallel=fsdp"


def config(precision: str, **changes: Any) -> dict[str, Any]:
    if precision == "fp32":
        # A tenth of the rate: Adam divides by sqrt(v), which turns the rounding noise of tiny gradients into whole steps, and
        # 20 of those at the full rate move a token to another expert now and then.
        changes = {"lr": 3e-4, **changes}
    return to_dict(tiny(precision=precision, balance_loss=0.1, router_z_loss=0.01, **EIGHT, **changes))


@lru_cache
def one_process(precision: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return parallel_targets.train(config(precision), [[]], 20)["variants"][0]


def variants(ranks: int) -> list[list[str]]:
    choices = [
        ["bucket_mib=1"],
        ["shard_optimizer=false"],
        ["data_parallel=fsdp"],
        [f"ep={min(ranks, 4)}", "transport=all_to_all"],
    ]
    return choices + (
        [["data_parallel=fsdp", "fsdp_shard=2"], ["ep=2", "transport=all_to_all"]] if ranks == 4 else []
    )


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_fp64_training_equals_one_process(ranks: int) -> None:
    results = launch.run(
        parallel_targets.train,
        ranks=ranks,
        timeout_s=280,
        show=False,
        config=config("fp64"),
        variants=variants(ranks),
        steps=20,
    )
    one = one_process("fp64")
    for index, changes in enumerate(variants(ranks)):
        for rank in range(ranks):
            many = results[rank]["variants"][index]
            assert many["losses"] == pytest.approx(one["losses"], rel=1e-9), (changes, rank)
            assert many["norms"] == pytest.approx(one["norms"], rel=1e-9), (changes, rank)
        for name, values in results[0]["variants"][index]["parameters"].items():
            assert values == pytest.approx(one["parameters"][name], rel=1e-9, abs=1e-9), (changes, name)


@pytest.mark.parametrize("ranks", [4])
def test_fp32_losses_equal_one_process(ranks: int) -> None:
    results = launch.run(
        parallel_targets.train,
        ranks=ranks,
        timeout_s=280,
        show=False,
        config=config("fp32"),
        variants=variants(ranks),
        steps=20,
    )
    one = one_process("fp32")
    for index, changes in enumerate(variants(ranks)):
        many = results[0]["variants"][index]
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5), changes
        assert many["norms"][0] == pytest.approx(one["norms"][0], rel=1e-5), changes


def test_fp32_gradients_equal_one_process_from_identical_parameters() -> None:
    seeds = [1, 2, 3]
    arguments = {"config": config("fp32"), "variants": variants(4), "seeds": seeds}
    (one,) = parallel_targets.gradients(config("fp32"), [[]], seeds)["variants"]
    many = launch.run(parallel_targets.gradients, ranks=4, timeout_s=280, show=False, **arguments)[0][
        "variants"
    ]
    for changes, by_seed in zip(variants(4), many, strict=True):
        for a, b in zip(one, by_seed, strict=True):
            for name, values in a.items():
                expected = torch.tensor(values, dtype=torch.float64)
                apart = torch.linalg.vector_norm(torch.tensor(b[name], dtype=torch.float64) - expected)
                assert apart <= 1e-5 * torch.linalg.vector_norm(expected), (changes, name)


def test_bytes_on_the_wire_equal_the_formulas() -> None:
    changes = [[], ["shard_optimizer=false"], ["data_parallel=fsdp"]]
    results = launch.run(
        parallel_targets.train,
        ranks=4,
        timeout_s=120,
        show=False,
        config=config("fp32"),
        variants=changes,
        steps=1,
    )
    sharded, replicated, fsdp = results[0]["variants"]
    total = sum(size for size, _ in sharded["buckets"])
    ring = 3 / 4
    metrics = 8 * (
        3 + 2 * (3 + 4)
    )  # the one small all-reduce of sums: 3 losses, and 3 + E numbers for each of 2 layers
    metrics_wire = round(2 * metrics * ring)
    assert sharded["sent"]["unknown"] == fsdp["sent"]["unknown"] == {}
    # Gradients reduce-scattered in fp32, weights gathered in fp32, once a step whatever the microbatches.
    assert sharded["sent"]["wire"] == round(4 * total * ring) + round(4 * total * ring) + metrics_wire
    assert replicated["sent"]["wire"] == pytest.approx(
        2 * 4 * sum(s for s, _ in replicated["buckets"]) * ring + metrics_wire, abs=8
    )
    # FSDP with full reshard: two gathers and one reduce-scatter of every parameter, for each of the 2 microbatches.
    parameters = sum(len(v) for v in fsdp["parameters"].values())
    kinds = fsdp["sent"]["kinds"]
    assert kinds["reduce_scatter"][1] == pytest.approx(2 * 4 * parameters * ring, rel=0.02)
    assert kinds["all_gather"][1] == pytest.approx(2 * 2 * 4 * parameters * ring, rel=0.02)
    assert fsdp["sent"]["wire"] > 1.9 * sharded["sent"]["wire"]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_memory_by_kind_is_the_closed_form(precision: str) -> None:
    results = launch.run(
        parallel_targets.train, ranks=4, timeout_s=120, show=False, config=config(precision), variants=[[], ["shard_optimizer=false"]],
        steps=1,
    )  # fmt: skip
    sharded, replicated = results[0]["variants"]
    count = sum(len(v) for v in sharded["parameters"].values())
    padded = sum(size for size, _ in sharded["buckets"])
    assert (
        count <= padded < 1.12 * count
    )  # padding: each tensor to 64 elements, each bucket to 64 for each rank
    width = 2 if precision == "bf16" else 4
    assert sharded["memory"] == {
        "weights": width * padded,
        "gradients": 4 * padded,
        "masters": padded if precision == "bf16" else 0,
        "moments": 2 * padded,
    }
    assert replicated["memory"]["moments"] == 8 * sum(size for size, _ in replicated["buckets"])


@pytest.mark.parametrize("sharded", [True, False])
def test_a_parameter_without_gradient_on_a_rank_counts_as_zero_and_still_decays(sharded: bool) -> None:
    results = launch.run(parallel_targets.gap, ranks=2, timeout_s=60, show=False, sharded=sharded)
    for r in results:
        # a: 2 rows of 1 on rank 0 and of 2 on rank 1 sum to 6 everywhere; b: 4 from rank 1 alone.
        assert r["norm"] == pytest.approx((12 * 6**2 + 12 * 4**2) ** 0.5)
        expected = 1 * (1 - 0.1 * 0.5) - 0.1
        for name in "ab":
            torch.testing.assert_close(
                torch.tensor(r[name]), torch.full((3, 4), expected), rtol=1e-5, atol=1e-6
            )


def test_mesh_groups() -> None:
    results = launch.run(parallel_targets.grid, ranks=8, timeout_s=60, show=False, pp=2, ep=2)
    assert results[0]["ranks"] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert results[6] == {
        "ranks": results[0]["ranks"], "pp": [2, 6], "dp": [4, 5, 6, 7], "edp": [4, 6], "ep": [6, 7],
    }  # fmt: skip
    assert rank_grid(ParallelConfig(), 4).tolist() == [[[0], [1], [2], [3]]]


def engine_of(model: torch.nn.Module, **parallel: Any) -> ShardedDataParallel:
    settings = ParallelConfig(**parallel).resolve(1)
    return ShardedDataParallel(
        model, Mesh(settings), settings, OptimConfig(lr=1e-3), weight_decay_of(model, ())
    )


@pytest.mark.parametrize("tied", [False, True])
def test_the_sink_holds_autograds_gradients(tied: bool) -> None:
    settings = tiny(tie_embeddings=tied).model
    plain, ours = build(settings, dtype=torch.float64), build(settings, dtype=torch.float64)
    engine = engine_of(ours, bucket_mib=1)
    engine.begin()
    for index in range(2):
        tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(index))
        engine.last = index == 1
        for model in (plain, ours):
            cross_entropy(model(tokens), tokens.roll(-1, 1)).cross_entropy.backward()
    assert engine.reducer._next == len(engine.buckets)  # every bucket was complete before finish() was called
    engine.finish()
    for (name, a), b in zip(plain.named_parameters(), ours.parameters()):
        torch.testing.assert_close(gradient_of(b), a.grad, rtol=1e-10, atol=1e-12, msg=name)
        assert b.grad is None
    engine.begin()
    assert not any(b.gradients.any() for b in engine.buckets)


def test_buckets_are_bounded_and_in_the_order_of_backward() -> None:
    model = build(tiny(n_layers=4, d_model=64, expert_hidden=64).model)
    engine = engine_of(model, bucket_mib=1)
    elements = 2**20 // 4
    for bucket in engine.buckets:
        assert len(bucket.members) == 1 or bucket.size <= elements + 64
        assert {m.parameter.data_ptr() % 256 for m in bucket.members} == {bucket.weights.data_ptr() % 256}
    order = [m.name for b in engine.buckets for m in b.members]
    assert sorted(order) == sorted(n for n, _ in model.named_parameters())
    first = [
        min(int(m.name.split(".")[1]) if m.name.startswith("blocks") else -1 for m in b.members)
        for b in engine.buckets
    ]
    assert first == sorted(first, reverse=True)


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3)])
def test_slot_linear(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(6, 3, dtype=torch.float64))
    expected = torch.autograd.grad(linear(x, weight).square().sum(), [x, weight])
    marks: list[int] = []
    slot = GradientSlot(torch.ones(6, 3, dtype=torch.float64), lambda: marks.append(1))
    set_slot(weight, slot)
    linear(x, weight).square().sum().backward()
    torch.testing.assert_close(x.grad, expected[0])
    torch.testing.assert_close(slot.total, expected[1] + 1)
    assert marks == [1]
    assert weight.grad is None


def test_adamw_equals_its_reference_and_torch() -> None:
    hyper = Hyper(0.9, 0.95, 1e-8, 0.1)
    generator = torch.Generator().manual_seed(0)
    torch_parameter = torch.nn.Parameter(torch.randn(100, generator=generator))
    start = torch_parameter.detach().clone()
    ours, plain = ([start.clone(), torch.zeros(100), torch.zeros(100)] for _ in range(2))
    optimizer = torch.optim.AdamW([torch_parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    low = start.bfloat16()
    for step in range(1, 6):
        grad = torch.randn(100, generator=generator)
        scale = torch.tensor(0.25 * step)
        apply = torch.tensor(0.0 if step == 3 else 1.0)
        number = torch.tensor(float(step - (step > 3)))
        adamw(*ours, grad.clone(), low, number, 0.01, hyper, scale, apply)
        reference(*plain, grad, number, 0.01, hyper, scale, apply)
        if step != 3:
            torch_parameter.grad = grad * scale
            optimizer.step()
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ours[0], torch_parameter.detach(), rtol=1e-5, atol=1e-7)
        assert torch.equal(low, ours[0].bfloat16())


def test_the_reference_adamw_is_exact_in_fp64() -> None:
    hyper = Hyper(0.9, 0.999, 1e-8, 0.1)
    start = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, plain = ([start.clone(), torch.zeros_like(start), torch.zeros_like(start)] for _ in range(2))
    scale, apply = torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.0)
    for step in range(1, 4):
        grad = start.sin() * step
        adamw(*ours, grad.clone(), ours[0], torch.tensor(float(step)), 0.01, hyper, scale, apply)
        reference(*plain, grad, torch.tensor(float(step)), 0.01, hyper, scale, apply)
        torch.testing.assert_close(ours, plain, rtol=1e-13, atol=1e-14)


def test_spikes_are_skipped_without_a_host_decision() -> None:
    guard = SpikeGuard(6.0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(64):
        value = 1 + 0.1 * torch.randn(2, generator=generator)
        assert guard.judge(value[0], value[1]) == 1.0
    assert guard.judge(torch.tensor(9.0), torch.tensor(1.0)) == 0.0
    assert guard.judge(torch.tensor(1.0), torch.tensor(9.0)) == 0.0
    assert guard.judge(torch.tensor(1.0), torch.tensor(1.0)) == 1.0
    early = SpikeGuard(6.0, torch.device("cpu"))
    for value in (1.0, 1.1, 0.9, 50.0):
        assert early.judge(torch.tensor(value), torch.tensor(1.0)) == 1.0
    for bad in (float("nan"), float("inf")):  # never applied, and forgotten
        assert guard.judge(torch.tensor(bad), torch.tensor(1.0)) == 0.0
        assert guard.judge(torch.tensor(1.0), torch.tensor(bad)) == 0.0
        assert guard.judge(torch.tensor(1.0), torch.tensor(1.0)) == 1.0
    off = SpikeGuard(0.0, torch.device("cpu"))
    assert off.judge(torch.tensor(1.0), torch.tensor(float("nan"))) == 0.0
    assert all(off.judge(torch.tensor(v), torch.tensor(v)) == 1.0 for v in (1.0, 1e9, 1.0))


def test_a_skipped_step_changes_nothing() -> None:
    trainer = Trainer(tiny(skip_sigma=2.0, steps=100, eval_every=0), show=False)
    guard = trainer.engine.optimizer.guard
    guard.values.normal_(1.0, 0.01)  # a window of losses near 1, which the real loss of 5.5 exceeds
    guard.seen.fill_(128)
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train_step()
    (row,) = trainer.metrics.fetch()
    assert row["optim/step skipped"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
    assert trainer.engine.optimizer.steps == 0


def test_masters_start_from_unrounded_weights() -> None:
    fp32, bf16 = (Trainer(tiny(precision=p), show=False).engine for p in ("fp32", "bf16"))
    assert isinstance(fp32, ShardedDataParallel)
    assert isinstance(bf16, ShardedDataParallel)
    for wide, narrow in zip(fp32.buckets, bf16.buckets, strict=True):
        assert torch.equal(wide.weights, narrow.master)
        assert torch.equal(wide.weights.bfloat16(), narrow.weights)
        assert not narrow.gradients.any()


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="needs at least 2, but this is 1"):
        Trainer(tiny(data_parallel="fsdp"), show=False)
    with pytest.raises(ConfigError, match="fsdp_shard is 3, which does not divide 4"):
        ParallelConfig(data_parallel="fsdp", fsdp_shard=3).resolve(4)
    with pytest.raises(ConfigError, match="'fsdp', a baseline without expert"):
        ParallelConfig(data_parallel="fsdp", ep=2, transport="all_to_all")
