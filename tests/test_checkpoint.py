"""Checkpoints: going on to the bit after a kill, at other layouts, whole or not there, refused where they do not fit."""

from __future__ import annotations

import json
import math
import resource
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_targets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import tiny

from moe_lab import launch
from moe_lab.config import OptimConfig, ParallelConfig, TrainConfig
from moe_lab.errors import ConfigError, DataError, RankError
from moe_lab.fields import override, to_dict
from moe_lab.parallel import Group, ShardedDataParallel
from moe_lab.parallel.mesh import ALONE
from moe_lab.records import RunRecord
from moe_lab.train import Trainer, checkpoint, latest, load_model

PRECISIONS = ("fp32", "fp64", "bf16")
STEPS = [2, 4, 6]


def config(precision: str = "fp32", *changes: str, **fields: Any) -> TrainConfig:
    fields = {
        "selection_bias": True,
        "checkpoint_every": 2,
        "eval_every": 0,
        "keep_checkpoints": 0,
        "router_z_loss": 0.01,
        "skip_sigma": 6.0,
        "sample_tokens": 2,  # text is not what is tested
        **fields,
    }
    return override(tiny(precision=precision, **fields), list(changes))


def fit(config: TrainConfig, folder: Path | None, **options: Any) -> Trainer:
    torch.set_num_threads(1)
    trainer = Trainer(config, folder, show=False, **options)
    trainer.fit()
    return trainer


def rows(folder: Path) -> list[dict[str, Any]]:
    """What the run wrote of each step, without what the clock says."""
    read = RunRecord(folder).metrics()
    return [{k: v for k, v in row.items() if k != "throughput/TPS"} for row in read]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:06d}"


def assert_close(ours: Path, theirs: Path, relative: float, first: int) -> None:
    """Losses and norms of the steps after ``first``; those before are not in a run that started from a checkpoint."""
    a, b = rows(ours), [row for row in rows(theirs) if row["step"] > first]
    assert [row["step"] for row in a] == [row["step"] for row in b]
    for x, y in zip(a, b):
        for key in ("train/CE loss", "optim/total grad norm", "train/load balancing loss"):
            assert x[key] == pytest.approx(y[key], rel=relative), (x["step"], key)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs ``<precision>-<ranks>``: whole ones on 4 ranks and 1, and ones that go on from their checkpoints elsewhere."""
    top = tmp_path_factory.mktemp("runs")

    def case(name: str, precision: str, resume: Path | None = None, *changes: str) -> dict[str, Any]:
        source = {} if resume is None else {"resume": str(resume)}
        return {"config": to_dict(config(precision, *changes)), "folder": str(top / name), **source}

    def launched(ranks: int, cases: list[dict[str, Any]]) -> None:
        launch.run(checkpoint_targets.fit, ranks=ranks, timeout_s=200, show=False, cases=cases)

    for p in PRECISIONS:
        fit(config(p), top / f"{p}-1")
    four = [case(f"{p}-4", p) for p in PRECISIONS]
    four += [case(f"{p}-1-4", p, step(top / f"{p}-1", 2)) for p in PRECISIONS]
    four += [case(f"{p}-4-4", p, step(top / f"{p}-4", 2)) for p in PRECISIONS]
    launched(4, four)
    two = [case(f"{p}-4-2", p, step(top / f"{p}-4", 2)) for p in PRECISIONS]
    two += [
        case(f"{p}-4-2r", p, step(top / f"{p}-4", 2), "shard_optimizer=false", "bucket_mib=1")
        for p in PRECISIONS
    ]
    launched(2, two)
    for p in PRECISIONS:
        fit(config(p), top / f"{p}-4-2-1", resume=step(top / f"{p}-4-2", 4))
        fit(config(p), top / f"{p}-4-2r-1", resume=step(top / f"{p}-4-2r", 4))
    return top


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_layout_goes_on_to_the_bit(runs: Path, precision: str) -> None:
    whole, resumed = runs / f"{precision}-4", runs / f"{precision}-4-4"
    assert rows(resumed) == rows(whole)[2:]
    assert weights(resumed) == weights(whole)
    (entry,) = RunRecord.open(resumed).read()["resumed"]
    assert (entry["step"], entry["from"]) == (2, str(step(whole, 2)))


@pytest.mark.parametrize(("precision", "relative"), [("fp32", 1e-6), ("fp64", 1e-12)])
def test_other_layouts_go_on_within_the_order_of_sums(runs: Path, precision: str, relative: float) -> None:
    whole = runs / f"{precision}-4"
    for name, first in (("4-2", 2), ("4-2r", 2), ("4-2-1", 4), ("4-2r-1", 4), ("1-4", 2)):
        assert_close(runs / f"{precision}-{name}", whole, relative, first)


def test_expert_parallel_degrees_go_on_from_each_other(tmp_path: Path) -> None:
    def case(name: str, resume: Path | None, *changes: str) -> dict[str, Any]:
        source = {} if resume is None else {"resume": str(resume)}
        return {"config": to_dict(config("fp64", *changes)), "folder": str(tmp_path / name), **source}

    two, four = ("ep=2", "transport=all_to_all"), ("ep=4", "transport=all_to_all")
    cases = [
        case("plain", None),
        case("ep2", None, *two),
        case("ep2-ep4", step(tmp_path / "ep2", 2), *four),
        case("ep2-plain", step(tmp_path / "ep2", 2)),
        case("plain-ep2", step(tmp_path / "plain", 2), *two),
        case("ep2-ep2", step(tmp_path / "ep2", 2), *two),
    ]
    launch.run(checkpoint_targets.fit, ranks=4, timeout_s=200, show=False, cases=cases)
    assert_close(tmp_path / "ep2", tmp_path / "plain", 1e-12, 0)
    for name in ("ep2-ep4", "ep2-plain", "plain-ep2"):
        assert_close(tmp_path / name, tmp_path / "plain", 1e-12, 2)
    assert rows(tmp_path / "ep2-ep2") == rows(tmp_path / "ep2")[2:]
    assert weights(tmp_path / "ep2-ep2") == weights(tmp_path / "ep2")
    fit(config("fp64"), tmp_path / "one", resume=step(tmp_path / "ep2-ep4", 4))
    assert_close(tmp_path / "one", tmp_path / "plain", 1e-12, 4)
    whole, shared = load_model(tmp_path / "plain" / "model"), load_model(tmp_path / "ep2" / "model")
    for (name, a), b in zip(whole.named_parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=name)


def stored(folder: Path, precision: str) -> dict[str, torch.Tensor]:
    """A checkpoint's whole arrays, read by one process."""
    torch.set_num_threads(1)
    trainer = Trainer(config(precision, checkpoint_every=0), show=False, resume=folder)
    return {p.key: p.data.clone() for p in checkpoint.pieces(trainer.model, trainer.engine)}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_masters_and_moments_are_the_same_bits_whatever_the_layout(
    runs: Path, precision: str, tmp_path: Path
) -> None:
    """Read over 4 ranks or 1, then written again at once: nothing is rounded and nothing lost."""
    source = step(runs / f"{precision}-4", 4)
    one = stored(source, precision)
    assert all(value.any() for key, value in one.items() if key.endswith((".m", ".v")))
    for ranks_changes in ([], ["shard_optimizer=false"]):
        trainer = Trainer(
            config(precision, *ranks_changes, checkpoint_background=False),
            tmp_path / f"again{len(ranks_changes)}",
            show=False,
            resume=source,
        )
        trainer.save_checkpoint()
        again = stored(step(tmp_path / f"again{len(ranks_changes)}", 4), precision)
        assert again.keys() == one.keys()
        for key, value in one.items():
            assert torch.equal(value, again[key]), key
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter.flatten(), one[f"{name}.master"].to(parameter.dtype)), name


def test_what_is_stored(runs: Path) -> None:
    """fp32 masters also for bf16 weights, each element once, no padding, nothing of the layout in names."""
    from torch.distributed.checkpoint import FileSystemReader

    folder = step(runs / "bf16-4", 4)
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    model = load_model(runs / "bf16-4" / "model")
    counts = {name: p.numel() for name, p in model.named_parameters()}
    expected = {f"{name}.{leaf}": n for name, n in counts.items() for leaf in ("master", "m", "v")}
    biases = {f"{n}.buffer": b.numel() for n, b in model.named_buffers()}
    assert len(biases) == 2
    expected |= {"optimizer.steps": 1, "guard.values": 256, "guard.seen": 1, **biases}
    assert {key: math.prod(m.size) for key, m in metadata.items()} == expected
    for key, m in metadata.items():
        assert sum(math.prod(c.sizes) for c in m.chunks) == expected[key], key
        if key.endswith((".master", ".m", ".v")):
            assert m.properties.dtype == torch.float32
    assert any(len(m.chunks) > 1 for m in metadata.values())
    written = sum(p.stat().st_size for p in folder.glob("*.distcp"))
    assert 12 * sum(counts.values()) < written
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 4
    assert state["config"]["model"] == to_dict(config("bf16"))["model"]


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 90)), min_size=1, max_size=5
    ),
    experts=st.integers(1, 200),
    replicas=st.integers(1, 5),
    ep=st.sampled_from([1, 2, 3]),
    sharded=st.booleans(),
)  # fmt: skip
def test_pieces_of_all_ranks_cover_each_array_once(
    shapes: list[tuple[int, int]], experts: int, replicas: int, ep: int, sharded: bool
) -> None:
    """Over replicas x expert-parallel ranks: dense parameters cut over all, experts over the replicas of each share."""
    covered: dict[str, torch.Tensor] = {}
    for rank in range(replicas * ep):
        replica, place = divmod(rank, ep)
        model = torch.nn.ModuleDict({"experts": torch.nn.Module(), "dense": torch.nn.ParameterList()})
        for rows_, columns in shapes:
            model["dense"].append(torch.nn.Parameter(torch.zeros(rows_, columns)))
        model["experts"].register_parameter("w", torch.nn.Parameter(torch.zeros(2, experts)))
        wrapped = torch.nn.ModuleDict({"block": model})
        mesh: Any = SimpleNamespace(
            dp=Group(None, replicas * ep, rank), edp=Group(None, replicas, replica),
            ep=Group(None, ep, place), everyone=ALONE,
        )  # fmt: skip
        names = [name for name, _ in wrapped.named_parameters()]
        engine = ShardedDataParallel(
            wrapped, mesh, ParallelConfig(shard_optimizer=sharded, bucket_mib=1), OptimConfig(lr=1.0), dict.fromkeys(names, True),
        )  # fmt: skip
        for piece in engine.state():
            if piece.key.endswith(".m"):
                count = covered.setdefault(piece.key, torch.zeros(piece.size, dtype=torch.int64))
                count[piece.offset : piece.offset + piece.data.numel()] += 1
    assert covered["block.experts.w.m"].numel() == 2 * experts * ep
    for key, count in covered.items():
        copies = 1 if sharded else replicas if ".experts." in key else replicas * ep
        assert (count == copies).all(), key


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_rank_killed_in_mid_step(tmp_path: Path, background: str) -> None:
    settings_ = to_dict(config("fp32", f"checkpoint_background={background}"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with pytest.raises(RankError) as caught:
        launch.run(
            checkpoint_targets.fit_and_die, ranks=2, timeout_s=100, show=False, config=settings_, folder=str(killed), rank=1,
            step=6, where="backward",
        )  # fmt: skip
    assert (caught.value.rank, caught.value.exit_code) == (1, -9)
    assert RunRecord.open(killed).read()["results"] == {}
    cases = [
        {"config": settings_, "folder": str(whole)},
        {"config": settings_, "folder": str(killed), "resume": "auto"},
    ]
    launch.run(checkpoint_targets.fit, ranks=2, timeout_s=100, show=False, cases=cases)
    assert [row["step"] for row in rows(killed)] == [1, 2, 3, 4, 5, 6]
    assert rows(killed) == rows(whole)
    assert weights(killed) == weights(whole)
    record = RunRecord.open(killed).read()
    assert record["status"] == "done"
    (entry,) = record["resumed"]
    # In the background, the save of step 4 may still have been under way when the rank died in step 6.
    assert entry["step"] in ((2, 4) if background == "true" else (4,))


@pytest.mark.parametrize(("ranks", "rank", "where"), [(2, 1, "write"), (1, 0, "rename")])
def test_a_save_that_is_killed_is_no_checkpoint(tmp_path: Path, ranks: int, rank: int, where: str) -> None:
    settings_ = config("fp32", checkpoint_background=False)  # so that it is the save of step 4 that dies
    with pytest.raises(RankError):
        launch.run(
            checkpoint_targets.fit_and_die, ranks=ranks, threads=1, timeout_s=100, show=False, config=to_dict(settings_),
            folder=str(tmp_path / "run"), rank=rank, step=4, where=where,
        )  # fmt: skip
    assert (tmp_path / "run" / "checkpoints" / ".step-000004.tmp").is_dir()
    assert latest(tmp_path / "run") == step(tmp_path / "run", 2)
    fit(settings_, tmp_path / "run", resume="auto")
    fit(settings_, tmp_path / "whole")
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        f"step-{n:06d}" for n in STEPS
    ]
    if ranks == 1:
        assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    else:
        assert_close(tmp_path / "run", tmp_path / "whole", 1e-6, 0)


def test_in_the_background_is_the_same_bits_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_lab.parallel import chunks

    torch.set_num_threads(1)
    contents = []
    for background in (False, True):
        folder = tmp_path / str(background)
        trainer = Trainer(config("bf16", checkpoint_background=background), folder, show=False)
        for _ in range(2):
            trainer.train_step()
        moved_on, save = threading.Event(), chunks.save
        monkeypatch.setattr(chunks, "save", lambda *a, go=moved_on, save=save: (go.wait(60), save(*a)))
        if not background:
            moved_on.set()
        trainer.save_checkpoint()
        trainer.train_step()  # changes masters, moments and weights before the thread has written any of them
        moved_on.set()
        assert trainer.checkpoints is not None
        trainer.checkpoints.wait()
        monkeypatch.undo()
        contents.append(stored(step(folder, 2), "bf16"))
    for key, value in contents[0].items():
        assert torch.equal(value, contents[1][key]), key


def test_pruning_keeps_the_last(tmp_path: Path) -> None:
    for keep, left in ((1, [6]), (2, [5, 6])):
        folder = tmp_path / str(keep)
        fit(config(checkpoint_every=1, keep_checkpoints=keep), folder)
        assert [int(p.name[5:]) for p in checkpoint.complete(folder)] == left
        assert not list((folder / "checkpoints").glob(".*"))
    fit(config(checkpoint_every=4), tmp_path / "last")
    assert [int(p.name[5:]) for p in checkpoint.complete(tmp_path / "last")] == [
        4,
        6,
    ]  # and after the last step


def test_everything_else_comes_back_too(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(config("bf16", checkpoint_background=False), tmp_path / "run", show=False)
    for name, buffer in trainer.model.named_buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(len(name))))
    for _ in range(3):
        trainer.train_step()
    trainer.save_checkpoint()
    other = Trainer(config("bf16"), tmp_path / "other", show=False, resume=tmp_path / "run")
    assert other.step == 3
    assert other.engine.optimizer.steps == 3
    assert other.engine.optimizer.guard.seen == 3
    assert torch.equal(other.engine.optimizer.guard.values, trainer.engine.optimizer.guard.values)
    for a, b in zip(trainer.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_an_earlier_checkpoint_of_the_same_run_puts_the_later_ones_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(config(), folder)
    before = rows(folder)
    (step(folder, 6) / "__0_0.distcp").unlink()
    with pytest.raises(DataError, match=r"step-000006 is damaged: __0_0.distcp is missing"):
        Trainer(config(steps=8), folder, show=False, resume=folder)
    fit(config(), folder, resume=step(folder, 2))
    assert rows(folder) == before
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert names == [
        "abandoned-step-000004",
        "abandoned-step-000006",
        "step-000002",
        "step-000004",
        "step-000006",
    ]


def test_a_longer_run_goes_on_from_the_last_step(tmp_path: Path) -> None:
    fit(config(schedule="constant"), tmp_path / "short")
    fit(config(schedule="constant", steps=8), tmp_path / "longer", resume=tmp_path / "short")
    fit(config(schedule="constant", steps=8), tmp_path / "whole")
    assert [r["train/CE loss"] for r in rows(tmp_path / "longer")] == [
        r["train/CE loss"] for r in rows(tmp_path / "whole")
    ][6:]


def test_a_run_stopped_after_its_last_step_is_brought_to_its_end(tmp_path: Path) -> None:
    fit(config(), tmp_path / "run")
    expected, model = rows(tmp_path / "run"), weights(tmp_path / "run")
    record = RunRecord.open(tmp_path / "run")
    final = record.read()["results"]["final train CE loss"]
    record.update(status="running", results={"final train CE loss": None})
    shutil.rmtree(tmp_path / "run" / "model")
    fit(config(), tmp_path / "run", resume="auto")
    assert record.read()["status"] == "done"
    assert record.read()["results"]["final train CE loss"] == final
    assert rows(tmp_path / "run") == expected
    assert weights(tmp_path / "run") == model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "run"
    fit(config(), folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (["expert_hidden=24"], ConfigError, r"model\.moe\.expert_hidden is 24, but 16 in the checkpoint .*step-000006"),
        (["n_layers=3"], ConfigError, r"model\.n_layers is 3, but 2"),
        (["gating=sigmoid"], ConfigError, r"model\.moe\.gating is 'sigmoid'"),
        (["sequences_per_step=16"], ConfigError, r"sequences_per_step is 16, but 8"),
        (["data.seed=1"], ConfigError, r"data\.seed is 1"),
        (["val_fraction=0.2"], DataError, r"fingerprint"),
        ([], ConfigError, r"at step 6, so with steps=6 nothing is left to train"),
        (["steps=5"], ConfigError, r"at step 6, so with steps=5 nothing is left"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused(
    source: Path, changes: list[str], error: type[Exception], words: str, tmp_path: Path
) -> None:
    steps = [] if any(c.startswith("steps") for c in changes) or not changes else ["steps=9"]
    with pytest.raises(error, match=words):
        Trainer(override(config(), [*changes, *steps]), tmp_path / "run", show=False, resume=source)
    assert not (tmp_path / "run").exists()


def test_fsdp_does_not_go_on_from_a_checkpoint(source: Path) -> None:
    last = step(source, 6)
    with pytest.raises(ConfigError, match="'fsdp', a baseline that cannot go on from the checkpoint"):
        checkpoint.check_fits(
            checkpoint.read_state(last), last, override(config(), ["data_parallel=fsdp"]), "any"
        )


def test_a_missing_or_damaged_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    longer = config(steps=9)

    def refused(words: str, resume: Path | str, error: type[Exception] = DataError) -> None:
        with pytest.raises(error, match=words):
            Trainer(longer, tmp_path / "run", show=False, resume=resume)
        assert not (tmp_path / "run").exists()

    refused(r"run holds no checkpoint to go on from", "auto")
    refused(r"nowhere holds no checkpoint", tmp_path / "nowhere")
    refused(r"step-000099 is no whole checkpoint: state.json is missing", tmp_path / "step-000099")
    with pytest.raises(ConfigError, match="but none is given"):
        Trainer(config(checkpoint_every=0, steps=9), show=False, resume="auto")
    for number, (name, words) in enumerate(
        ((".metadata", r"\.metadata is missing"), ("__0_0.distcp", "__0_0.distcp is missing"))
    ):
        copy = tmp_path / f"copy{number}" / "step-000004"
        shutil.copytree(step(source, 4), copy)
        (copy / name).unlink()
        refused(words, copy)
    cut = tmp_path / "cut" / "step-000004"
    shutil.copytree(step(source, 4), cut)
    data = (cut / "__0_0.distcp").read_bytes()
    (cut / "__0_0.distcp").write_bytes(data[:-100])
    refused(rf"__0_0.distcp has {len(data) - 100} bytes instead of {len(data)}", cut)
    (cut / "__0_0.distcp").write_bytes(b"\0" * len(data))  # the right size, but not what was written
    refused(r"cannot read the checkpoint .*step-000004: rank 0 could not read its part", cut)
    (cut / "state.json").write_text("{}")
    refused(r"state.json is not a checkpoint of format 1", cut)
    (cut / "state.json").write_text("{")
    refused(r"state.json cannot be read", cut)


def test_what_cannot_keep_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint_every is 2, but there is no run folder"):
        Trainer(config(), show=False)
    with pytest.raises(ConfigError, match="keep_checkpoints is -1"):
        config(keep_checkpoints=-1)


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_is_full_ends_the_run_with_one_sentence(tmp_path: Path, background: bool) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(config(checkpoint_background=background), tmp_path / "run", show=False)
    trainer.train_step()
    trainer.save_checkpoint()
    assert trainer.checkpoints is not None
    trainer.checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # stands for the disk: writing past it fails
    try:
        with pytest.raises(
            DataError, match=r"cannot write the checkpoint .*step-000002: rank 0 could not write"
        ):
            trainer.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    record = RunRecord.open(tmp_path / "run").read()
    assert (record["status"], record["error"]["type"]) == ("failed", "DataError")
    assert Trainer(config(), tmp_path / "run", show=False, resume="auto").step == 1


def test_a_folder_that_cannot_be_written_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    trainer = Trainer(config(), tmp_path / "run", show=False)
    (tmp_path / "run" / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cannot write the checkpoint .*step-000002: Not a directory"):
        trainer.fit()


def test_a_trained_run_exports_to_the_hugging_face_layout(tmp_path: Path) -> None:
    from moe_lab.interop import load_pretrained, save_pretrained

    trainer = fit(
        config(
            shared_hidden=0, merge="unit_sum", norm_placement="pre", embed_scale=False, embed_norm=False, checkpoint_every=0,
            selection_bias=False,
        ),
        tmp_path / "run",
    )  # fmt: skip
    model = load_model(tmp_path / "run" / "model")
    save_pretrained(model, tmp_path / "hf", "qwen3_moe")
    back = load_pretrained(tmp_path / "hf")
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    trainer.model.eval()
    back.eval()
    torch.testing.assert_close(back(tokens), trainer.model(tokens), rtol=1e-5, atol=1e-6)
