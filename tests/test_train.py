"""The training loop: equal over ranks, repeatable to the bit, masked labels, evaluation, records, refusals."""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_lab import launch, presets
from moe_lab.config import OptimConfig, TrainConfig
from moe_lab.data import prepare
from moe_lab.errors import ConfigError, DataError, RankError
from moe_lab.fields import from_dict, override, to_dict
from moe_lab.launch.worker import init_process_group
from moe_lab.model import build
from moe_lab.parallel import weight_decay_of
from moe_lab.records import RunRecord
from moe_lab.train import Trainer, fit_ranks, generate, load_model, save_model
from moe_lab.train.optim import exempt_modules, learning_rate
from moe_lab.train.store import with_initial_model

TINY: dict[str, Any] = {
    "n_layers": 2, "d_model": 32, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "expert_hidden": 16, "shared_hidden": 8,
    "experts": 4, "sequence_length": 16, "sequences_per_step": 8, "microbatch_sequences": 2, "steps": 6, "warmup_steps": 2,
    "eval_every": 3, "eval_sequences": 10, "log_every": 2, "sample_tokens": 20,
}  # fmt: skip


@lru_cache
def small_text() -> str:
    """A file with the first 60,000 bytes of the King James text, since the last evaluation reads all of validation."""
    folder = Path(tempfile.mkdtemp(prefix="moe_lab_test_text"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = Path(__file__).resolve().parent.parent / "data" / "kjv.txt"
    (folder / "text.txt").write_bytes(source.read_bytes()[:60_000])
    return str(folder / "text.txt")


def tiny(**changes: Any) -> TrainConfig:
    return presets.get("laptop", **{"source": small_text(), **TINY, **changes})


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def trained(config: TrainConfig, run_dir: Path | None = None) -> tuple[Trainer, dict[str, Any]]:
    trainer = Trainer(config, run_dir, show=False)
    return trainer, trainer.fit()


def test_a_run_leaves_a_record_metrics_and_a_model(tmp_path: Path) -> None:
    trainer, results = trained(tiny(), tmp_path / "run")
    record = RunRecord.open(tmp_path / "run")
    value = record.read()
    assert (value["status"], value["kind"], value["name"]) == ("done", "train", "laptop")
    assert value["results"]["final validation CE loss"] == results["final validation CE loss"]
    assert value["layout"]["microbatches"] == 4
    assert value["paths"]["ops"] == "fast"
    rows = record.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["train/CE loss"] == pytest.approx(math.log(256), rel=0.05)
    assert [row["step"] for row in rows if "eval/CE loss" in row] == [3, 6]
    for row in rows:
        assert sum(map(sum, row["expert counts"])) == 2 * 8 * 16 * 2  # layers x sequences x length x top-k
        assert row["train/load balancing loss"] == pytest.approx(
            0.01 * row["train/load balancing loss unscaled"]
        )
        assert row["block 01/load imbalance"] == max(row["expert counts"][1]) * 4 / sum(
            row["expert counts"][1]
        )
    model = load_model(tmp_path / "run" / "model")
    tokens = torch.randint(0, 256, (1, 16))
    trainer.model.eval()
    assert torch.equal(model(tokens), trainer.model(tokens))
    with pytest.raises(DataError, match="already exists"):
        Trainer(tiny(), tmp_path / "run", show=False)


def test_a_second_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    losses = []
    for name in ("a", "b"):
        trained(tiny(), tmp_path / name)
        losses.append(
            [(r["train/CE loss"], r["optim/total grad norm"]) for r in RunRecord(tmp_path / name).metrics()]
        )
    assert losses[0] == losses[1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_process(ranks: int, tmp_path: Path) -> None:
    config = tiny(precision="fp64", balance_loss=0.1, router_z_loss=0.01)
    trainer, _ = trained(config, tmp_path / "one")
    results = launch.run(
        fit_ranks,
        ranks=ranks,
        timeout_s=120,
        show=False,
        config=to_dict(config),
        folder=str(tmp_path / "many"),
    )
    assert len(results) == ranks
    one, many = RunRecord(tmp_path / "one").metrics(), RunRecord(tmp_path / "many").metrics()
    for a, b in zip(one, many, strict=True):
        for key in a:
            if key == "expert counts":
                assert a[key] == b[key]
            elif key != "throughput/TPS":
                assert a[key] == pytest.approx(b[key], rel=1e-9, abs=1e-12), key
    loaded = load_model(tmp_path / "many" / "model")
    for (name, a), b in zip(trainer.model.named_parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("changes", [{"data_parallel": "fsdp"}, {"ep": 2, "transport": "all_to_all"}])
def test_shared_weights_are_sampled_and_stored_whole(changes: dict, tmp_path: Path) -> None:
    one, _ = trained(tiny(precision="fp64"), tmp_path / "one")
    config = to_dict(tiny(precision="fp64", **changes))
    results = launch.run(
        fit_ranks, ranks=2, timeout_s=120, show=False, config=config, folder=str(tmp_path / "two")
    )
    assert isinstance(results[0]["sample after"], str)
    assert results[1]["sample after"] is None
    loaded = load_model(tmp_path / "two" / "model")
    for (name, a), b in zip(one.model.named_parameters(), loaded.named_parameters(), strict=True):
        assert b[0] == name
        torch.testing.assert_close(a, b[1], rtol=0, atol=1e-9, msg=name)


def test_ranks_repeat_to_the_bit(tmp_path: Path) -> None:
    config = to_dict(tiny())
    for name in ("a", "b"):
        launch.run(fit_ranks, ranks=4, timeout_s=120, show=False, config=config, folder=str(tmp_path / name))
    a, b = (RunRecord(tmp_path / name).metrics() for name in "ab")
    assert [r["train/CE loss"] for r in a] == [r["train/CE loss"] for r in b]
    assert [r["optim/total grad norm"] for r in a] == [r["optim/total grad norm"] for r in b]


def documents(folder: Path) -> str:
    source = folder / "texts.jsonl"
    source.write_text(
        "".join(json.dumps({"text": f"text number {i} " * (1 + i % 7)}) + "\n" for i in range(200))
    )
    prepare([source], folder / "tokens")
    return str(folder / "tokens")


def test_labels_across_documents_are_masked_and_the_loss_divided_by_the_rest(tmp_path: Path) -> None:
    config = tiny(
        source=documents(tmp_path),
        mask_documents=True,
        balance_loss=0,
        router_z_loss=0,
        z_loss=0,
        precision="fp64",
    )
    trainer = Trainer(config, show=False)
    batch = trainer.train_data.batch(0, 8)
    labels = int((batch[1] != -100).sum())
    assert 0 < labels < 8 * 16
    model = build(config.model, dtype=torch.float64)
    logits = model(batch[0], batch[2])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=-100)
    loss.backward()
    expected = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(p.grad) for p in model.parameters()])
    )
    trainer.train_step()
    (row,) = trainer.metrics.fetch()
    assert row["train/CE loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert row["optim/total grad norm"] == pytest.approx(expected.item(), rel=1e-12)


def test_masked_labels_are_counted_over_all_ranks(tmp_path: Path) -> None:
    config = tiny(source=documents(tmp_path), mask_documents=True, precision="fp64")
    trained(config, tmp_path / "one")
    launch.run(
        fit_ranks, ranks=4, timeout_s=120, show=False, config=to_dict(config), folder=str(tmp_path / "four")
    )
    one, four = (RunRecord(tmp_path / n).metrics() for n in ("one", "four"))
    assert [r["train/CE loss"] for r in one] == pytest.approx([r["train/CE loss"] for r in four], rel=1e-9)
    assert [r["optim/total grad norm"] for r in one] == pytest.approx(
        [r["optim/total grad norm"] for r in four], rel=1e-9
    )


def test_accumulation_does_not_change_the_step() -> None:
    norms = []
    for size in (8, 4, 1):
        trainer = Trainer(
            tiny(precision="fp64", balance_loss=0, router_z_loss=0, microbatch_sequences=size), show=False
        )
        trainer.train_step()
        norms.append(trainer.metrics.fetch()[0]["optim/total grad norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-10)


def test_schedules() -> None:
    cosine = OptimConfig(lr=1.0, schedule="cosine", warmup_steps=10, final_fraction=0.1)
    assert [learning_rate(cosine, s, 110) for s in (0, 9, 10, 60)] == pytest.approx([0.1, 1.0, 1.0, 0.55])
    assert learning_rate(cosine, 110, 110) == pytest.approx(0.1)
    wsd = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=10, decay_steps=20, final_fraction=0.0)
    assert [learning_rate(wsd, s, 100) for s in (4, 50, 80, 90, 99)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.5, 0.05]
    )
    assert learning_rate(OptimConfig(lr=1.0, schedule="constant"), 99, 100) == 1.0


def test_what_decays() -> None:
    model = build(tiny().model, "meta")
    for no_decay, free in (
        (("embedding", "norm"), {"embedding", "norm"}),
        (("embedding",), {"embedding"}),
        ((), set()),
    ):
        config = OptimConfig(lr=1.0, no_decay=no_decay)
        decays = weight_decay_of(model, exempt_modules(config))
        assert set(decays) == {name for name, _ in model.named_parameters()}
        for name, value in decays.items():
            kind = "norm" if "norm" in name else "embedding" if name.startswith("embedding.") else "matrix"
            assert value == (kind not in free), name


def test_bf16_trains_near_fp32() -> None:
    fp32, bf16 = (trained(tiny(precision=p))[1]["final train CE loss"] for p in ("fp32", "bf16"))
    assert fp32 != bf16
    assert bf16 == pytest.approx(fp32, rel=0.02)


def test_generation_is_repeatable_and_bounded(tmp_path: Path) -> None:
    trainer = Trainer(tiny(), show=False)
    first = generate(trainer.model, [65, 66], 20, context=16, seed=4)
    assert first == generate(trainer.model, [65, 66], 20, context=16, seed=4)
    assert first[:2] == [65, 66]
    assert len(first) == 22
    greedy = generate(trainer.model, [65], 5, context=16, temperature=0)
    assert greedy == generate(trainer.model, [65], 5, context=16, temperature=0, seed=9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "mxfp8"}, "precision is 'mxfp8'"),
        ({"ep": 2, "transport": "rowwise"}, "transport 'rowwise'"),
        ({"pp": 2}, "pp 2"),
        ({"recompute": "block"}, "'block'"),
        ({"vocab_size": 100}, "ids up to 255"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    changes: dict, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        Trainer(tiny(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for changes, words in (
        ({"source": "no/such/file.txt"}, "no/such/file"),
        ({"sequence_length": 10**7}, "10000000"),
    ):
        with pytest.raises(DataError, match=words):
            Trainer(tiny(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_failing_run_says_so_in_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tiny(), tmp_path / "run", show=False)
    monkeypatch.setattr(trainer, "evaluate", lambda sequences: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    value = RunRecord.open(tmp_path / "run").read()
    assert value["status"] == "failed"
    assert value["error"]["type"] == "ZeroDivisionError"
    assert value["error"]["where"] == "step 3"


def fit_with_a_failing_rank(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Rank 1 raises after step 3, while rank 0 goes on into the next collective."""
    trainer = Trainer(from_dict(TrainConfig, config), folder, show=False)
    step = trainer.train_step

    def failing() -> None:
        step()
        if trainer.rank == 1 and trainer.step == 3:
            raise ZeroDivisionError("rank 1 had enough")

    trainer.train_step = failing  # type: ignore[method-assign]
    return trainer.fit()


def test_any_rank_that_fails_says_so_in_the_record(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 2: ZeroDivisionError"):
        launch.run(
            fit_with_a_failing_rank, ranks=2, threads=1, show=False, run_dir=tmp_path / "ranks",
            config=to_dict(tiny()), folder=str(tmp_path / "run"),
        )  # fmt: skip
    value = RunRecord.open(tmp_path / "run").read()
    assert (value["status"], value["error"]["type"]) == ("failed", "ZeroDivisionError")
    assert value["error"]["where"] == "step 3, rank 1 of 2"


def test_models_that_do_not_load_say_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json is missing"):
        load_model(tmp_path)
    trainer = Trainer(tiny(), show=False)
    folder = save_model(trainer.model, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="cannot be read"):
        load_model(folder)


def test_training_goes_on_from_a_stored_model(tmp_path: Path) -> None:
    first, results = trained(tiny(steps=40, eval_every=0), tmp_path / "first")
    folder = tmp_path / "first" / "model"
    config = with_initial_model(tiny(steps=4, eval_every=0, seed=7), folder)
    second = Trainer(config, show=False)
    for (name, a), b in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    second.train_step()
    (row,) = second.metrics.fetch()
    assert row["train/CE loss"] == pytest.approx(results["final train CE loss"], abs=0.3)
    with pytest.raises(ConfigError, match=r"top_k is 1, but 2 in the initial model"):
        Trainer(override(config, ["top_k=1"]), tmp_path / "no", show=False)
    assert not (tmp_path / "no").exists()


def test_one_process_needs_no_launcher() -> None:
    assert init_process_group() in (True, False)
