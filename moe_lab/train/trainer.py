"""The training loop. Lesson: 00_start_here.

A step: ``microbatches`` forward and backward passes, one reduction of gradients over the ranks, clipping, AdamW. Microbatch j
of the step's dp * m holds sequences j * microbatch_sequences onwards of the data's order, and rank r takes the m that
start at r * m; so the same run over another number of ranks computes the same microbatches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_lab.config import TrainConfig
from moe_lab.data import Batches, TokenFolder, cached, val_batches
from moe_lab.errors import ConfigError, DataError
from moe_lab.fields import to_dict
from moe_lab.launch import heartbeat
from moe_lab.launch.worker import device as rank_device
from moe_lab.model import IGNORE, LossSums, Transformer, build, cross_entropy
from moe_lab.parallel import (
    Mesh,
    ShardedDataParallel,
    sum_over_ranks,
    weight_decay_of,
    world,
)
from moe_lab.parallel.expert import AllToAllTransport
from moe_lab.records import RunRecord
from moe_lab.train import checkpoint
from moe_lab.train.describe import DTYPES, check_supported, layout, paths
from moe_lab.train.evaluate import sample_text, validation_loss, whole_state
from moe_lab.train.metrics import StepMetrics, summary_line
from moe_lab.train.optim import exempt_modules, learning_rate
from moe_lab.train.store import load_weights, save_model

if TYPE_CHECKING:
    from moe_lab.parallel.fsdp import FullyShardedBaseline


class Trainer:
    """Trains ``config`` on this process, as one rank of the process group if one was started.

    ``run_dir``: where rank 0 writes ``record.json``, ``metrics.jsonl`` and the final model; None writes nothing.
    ``resume``: go on from a checkpoint: "auto" for the last one in ``run_dir``, or the folder of a checkpoint or of a run. One
    of ``run_dir`` itself goes on in that folder, over any number of ranks; another run's starts a new folder.
    ``show``: rank 0 prints a line every ``log_every`` steps. Everything that can be refused is refused here, before
    anything is written: :class:`ConfigError` for what cannot run, :class:`~moe_lab.errors.DataError` for bad data.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_dir: str | Path | None = None,
        *,
        device: str | None = None,
        show: bool = True,
        resume: str | Path | None = None,
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self.rank, self.ranks = world()
        check_supported(config)
        if config.checkpoint_every and run_dir is None:
            raise ConfigError(
                f"TrainConfig.checkpoint_every is {config.checkpoint_every}, but there is no run folder to keep checkpoints in"
            )
        source = checkpoint.find(resume, run_dir) if resume is not None else None
        state = checkpoint.read_state(source) if source else {}
        self.parallel = config.parallel.resolve(self.ranks)
        self.microbatches = config.microbatches_per_rank(self.parallel.dp)
        self.device = torch.device(device) if device else rank_device()
        self.tokens: TokenFolder = cached(
            config.data.source, tokenizer=config.data.tokenizer, val_fraction=config.data.val_fraction
        )
        if self.tokens.vocab_size > config.model.vocab_size:
            raise ConfigError(
                f"the token folder uses ids up to {self.tokens.vocab_size - 1}, but ModelConfig.vocab_size is "
                f"{config.model.vocab_size}: set model.vocab_size={self.tokens.vocab_size}"
            )
        self.train_data = Batches(
            self.tokens,
            "train",
            config.sequence_length,
            config.data.seed,
            documents=config.data.mask_documents,
        )
        self._validation(1)  # refuses a split that holds no sequence, before anything is written
        if source:
            checkpoint.check_fits(state, source, config, self.tokens.fingerprint)
        self.mesh = Mesh(self.parallel, self.device.type)
        self.model = self._build_model(source is None)
        decays = weight_decay_of(self.model, exempt_modules(config.optim))
        self.engine: ShardedDataParallel | FullyShardedBaseline
        if self.parallel.data_parallel == "fsdp":
            from moe_lab.parallel.fsdp import FullyShardedBaseline

            compute = DTYPES[config.precision]
            self.engine = FullyShardedBaseline(
                self.model, self.mesh, self.parallel, config.optim, decays, compute
            )
        else:
            self.engine = ShardedDataParallel(
                self.model, self.mesh, self.parallel, config.optim, decays, DTYPES[config.precision]
            )
        self.metrics = StepMetrics(config, self.model)
        self.step = 0
        if source:
            assert isinstance(self.engine, ShardedDataParallel)
            checkpoint.restore(source, self.model, self.engine)
            self.step = state["step"]
        self.show = show and self.rank == 0
        self.record = self._start_record(run_dir, source) if run_dir is not None and self.rank == 0 else None
        self.checkpoints: checkpoint.Checkpoints | None = None
        if config.checkpoint_every and run_dir is not None:
            self.checkpoints = checkpoint.Checkpoints(
                run_dir, config.keep_checkpoints, config.checkpoint_background
            )

    def _start_record(self, run_dir: str | Path, source: Path | None) -> RunRecord:
        fields: dict[str, Any] = {
            "config": to_dict(self.config), "layout": layout(self.config, self.parallel, self.ranks),
            "paths": paths(self.config, self.parallel, self.device),
        }  # fmt: skip
        if source and checkpoint.belongs_to(source, run_dir):
            return checkpoint.reopen(run_dir, source, self.step, **fields)
        if source:
            fields["resumed"] = [checkpoint.resumed_entry(source, self.step)]
        return RunRecord.create(run_dir, kind="train", name=self.config.name, **fields)

    def _build_model(self, fresh: bool) -> Transformer:
        config = self.config
        dtype = torch.promote_types(DTYPES[config.precision], torch.float32)  # masters start unrounded
        ep = self.mesh.ep
        model = build(
            config.model, self.device, dtype, initial=fresh and not config.initial_model,
            expert_rank=ep.rank, expert_ranks=ep.size,
        )  # fmt: skip
        if fresh and config.initial_model:
            load_weights(model, config.initial_model)
        if ep.size > 1:
            for _, layer in model.moe_layers():
                layer.transport = AllToAllTransport(ep, layer.config.n_experts)
        return model

    def whole_state(self) -> dict[str, Tensor]:
        """The weights and buffers of the whole model, put together from the ranks that share them. All ranks together."""
        return whole_state(self.model, self.mesh.ep)

    def fit(self) -> dict[str, Any]:
        """Train to the last step; returns the results that the record keeps. The record says "failed" if this raises."""
        try:
            results = self._fit()
        except BaseException as error:
            self._record_failure(error)
            if self.checkpoints is not None:
                # A save under way is still good. What it may raise in turn follows from the error at hand.
                with contextlib.suppress(Exception):
                    self.checkpoints.wait()
            raise
        if self.record is not None:
            self.record.update(results=results)
            self.record.finish("done")
        return results

    def _record_failure(self, error: BaseException) -> None:
        """Say why the run ended in its record, from whichever rank fails first: the others are stopped, or fail of that."""
        if self.run_dir is None:
            return
        record = self.record or RunRecord(self.run_dir)
        where = f"step {self.step}" + (f", rank {self.rank} of {self.ranks}" if self.ranks > 1 else "")
        detail = {"type": type(error).__name__, "message": str(error), "where": where}
        with contextlib.suppress(
            DataError, OSError
        ):  # no folder here, or a full disk: the error at hand matters more
            if record.read()["status"] == "running":
                record.finish("killed" if isinstance(error, KeyboardInterrupt) else "failed", error=detail)

    def _fit(self) -> dict[str, Any]:
        config = self.config
        if self.show:
            print(f"{config.name}: {self.ranks} ranks x {self.microbatches} microbatches of {config.microbatch_sequences} x "
                  f"{config.sequence_length} tokens; {paths(config, self.parallel, self.device)}", flush=True)  # fmt: skip
            if self.step:
                print(f"goes on after step {self.step}", flush=True)
        before = self.sample()
        started = mark = time.perf_counter()
        marked_step, rates = self.step, []
        evaluations: dict[int, float | None] = {}
        last: dict[str, Any] = {}
        while self.step < config.steps:
            self.train_step()
            heartbeat(f"step {self.step}")
            evaluate = config.eval_every > 0 and (
                self.step % config.eval_every == 0 or self.step == config.steps
            )
            last_step = self.step == config.steps
            # Before a checkpoint all rows are written, so that a run that goes on from it lacks none.
            keep = self.checkpoints is not None and (self.step % config.checkpoint_every == 0 or last_step)
            if not (evaluate or keep or self.step % config.log_every == 0 or last_step):
                continue
            rows = self.metrics.fetch()
            seconds = time.perf_counter() - mark
            rate = (self.step - marked_step) * config.tokens_per_step / seconds
            rates.append(rate)
            last = rows[-1]
            for row in rows:
                row["throughput/TPS"] = rate
            if evaluate:
                sequences = 0 if self.step == config.steps else config.eval_sequences
                last["eval/CE loss"] = evaluations[self.step] = self.evaluate(sequences)
            if self.record is not None:
                for row in rows:
                    self.record.log(**row)
            if self.show:
                print(summary_line(last, config.steps), flush=True)
            if keep:
                self.save_checkpoint()
            mark, marked_step = time.perf_counter(), self.step
        if self.checkpoints is not None:
            self.checkpoints.wait()
        if not last and self.record is not None:  # the run was stopped between its last step and its end
            last = next(iter(self.record.metrics()[-1:]), {})
            evaluations[self.step] = last.get("eval/CE loss")
        rates = rates[1:] or rates  # the first interval holds warm-up of the allocator and the kernels
        return {
            "steps": self.step,
            "final train CE loss": last.get("train/CE loss"),
            "final validation CE loss": evaluations.get(self.step),
            "tokens per second": sorted(rates)[len(rates) // 2] if rates else None,
            "seconds": time.perf_counter() - started,
            "sample before": before,
            "sample after": self.sample(),
            "expert counts": last.get("expert counts"),
            **self._save(),
        }

    def train_step(self) -> None:
        """One optimizer step over all ranks; advances ``step`` and adds to ``metrics``."""
        config = self.config
        batches = [self._microbatch(index) for index in range(self.microbatches)]
        labels: float | Tensor = float(config.tokens_per_step)
        if config.data.mask_documents:
            # Counted on the device, so that the host does not wait.
            counted = torch.stack([(b[1] != IGNORE).sum() for b in batches]).sum()
            labels = sum_over_ranks(counted.float())
        share = 1.0 / (self.microbatches * self.parallel.dp)
        scale = self.engine.loss_scale
        self.engine.begin()
        sums = []
        for index, (tokens, targets, documents) in enumerate(batches):
            self.engine.last = index == len(batches) - 1
            logits = self.model(tokens, documents, aux_weight=share * scale)
            part = cross_entropy(logits, targets)
            ((part.cross_entropy + config.z_loss * part.z) / labels * scale).backward()
            sums.append(LossSums(part.cross_entropy.detach(), part.z.detach(), part.labels))
        self.engine.finish()
        lr = learning_rate(config.optim, self.step, config.steps)
        row = self.metrics.reduce(sums)
        norm, applied = self.engine.step(lr, row[0] / row[2])
        self.step += 1
        self.metrics.add(self.step, lr, row, norm, applied)

    def _microbatch(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        count = self.config.microbatch_sequences
        first = self.step * self.config.sequences_per_step + (self.rank * self.microbatches + index) * count
        return self._to_device(self.train_data.batch(first, count))

    def _to_device(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
        moved = [part.to(self.device, non_blocking=True) for part in batch]
        return moved[0], moved[1], moved[2] if len(moved) > 2 else None

    def _validation(self, sequences: int) -> Iterator[tuple[Tensor, ...]]:
        config = self.config
        return val_batches(
            self.tokens, config.sequence_length, config.microbatch_sequences, limit=sequences or None,
            rank=self.rank, ranks=self.ranks, documents=config.data.mask_documents,
        )  # fmt: skip

    def evaluate(self, sequences: int = 0) -> float:
        """Cross-entropy in nats a label over ``sequences`` spread over the validation split (0: all), shared over the ranks."""
        return validation_loss(self.model, map(self._to_device, self._validation(sequences)), self.device)

    def sample(self) -> str | None:
        """``sample_tokens`` of text that the model goes on with after a fixed prompt; None if 0, and on ranks other than 0."""
        shared = (
            self.mesh.ep.size > 1 or self.parallel.data_parallel == "fsdp"
        )  # then a forward needs every rank
        if self.config.sample_tokens == 0 or (self.rank != 0 and not shared):
            return None
        text = sample_text(
            self.model, self.tokens.tokenizer(), self.config.sample_tokens, self.config.sequence_length
        )
        return text if self.rank == 0 else None

    def save_checkpoint(self) -> None:
        """Write the run's state after this step into its folder, in the background if so configured. All ranks together."""
        assert self.checkpoints is not None
        assert isinstance(self.engine, ShardedDataParallel)
        state = {"step": self.step, "config": to_dict(self.config), "data": self.tokens.fingerprint}
        self.checkpoints.save(self.model, self.engine, state)

    def _save(self) -> dict[str, Any]:
        if self.run_dir is None:
            return {}
        state = self.whole_state()
        return (
            {"model": str(save_model(self.model, Path(self.run_dir) / "model", state))}
            if self.rank == 0
            else {}
        )
