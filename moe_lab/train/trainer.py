"""The training loop. Lesson: 00_start_here.

A step: ``microbatches`` forward and backward passes, one reduction of gradients over the ranks, clipping, AdamW. Microbatch j
of the step's dp * m holds sequences j * microbatch_sequences onwards of the data's order, and rank r takes the m that
start at r * m; so the same run over another number of ranks computes the same microbatches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_lab.config import TrainConfig
from moe_lab.data import Batches, TokenFolder, cached, val_batches
from moe_lab.errors import ConfigError
from moe_lab.fields import to_dict
from moe_lab.launch import heartbeat
from moe_lab.launch.worker import device as rank_device
from moe_lab.model import IGNORE, LossSums, Transformer, build, cross_entropy
from moe_lab.ops import reference_only
from moe_lab.parallel import (
    Mesh,
    ShardedDataParallel,
    sum_over_ranks,
    weight_decay_of,
    world,
)
from moe_lab.records import RunRecord
from moe_lab.train.generate import generate
from moe_lab.train.metrics import StepMetrics, summary_line
from moe_lab.train.optim import exempt_modules, learning_rate
from moe_lab.train.store import load_weights, save_model

if TYPE_CHECKING:
    from moe_lab.parallel.fsdp import FullyShardedBaseline

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
SAMPLE_PROMPT = "And the LORD said"
SAMPLE_TOKENS = 200


class Trainer:
    """Trains ``config`` on this process, as one rank of the process group if one was started.

    ``run_dir``: where rank 0 writes ``record.json``, ``metrics.jsonl`` and the final model; None writes nothing.
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
    ) -> None:
        self.config = config
        self.rank, self.ranks = world()
        check_supported(config)
        self.parallel = config.parallel.resolve(self.ranks)
        self.microbatches = config.microbatches_per_rank(self.parallel.dp)
        self.device = torch.device(device) if device else rank_device()
        self.tokens: TokenFolder = cached(
            config.data.source, tokenizer=config.data.tokenizer, val_fraction=config.data.val_fraction
        )
        if self.tokens.vocab_size > config.model.vocab_size:
            raise ConfigError(
                f"the token folder uses ids up to {self.tokens.vocab_size - 1}, but ModelConfig.vocab_size is {config.model.vocab_size}"
            )
        self.train_data = Batches(
            self.tokens,
            "train",
            config.sequence_length,
            config.data.seed,
            documents=config.data.mask_documents,
        )
        self._validation(1)  # refuses a split that holds no sequence, before anything is written
        self.mesh = Mesh(self.parallel, self.device.type)
        self.model = self._build_model()
        decays = weight_decay_of(self.model, exempt_modules(config.optim))
        self.engine: ShardedDataParallel | FullyShardedBaseline
        if self.parallel.data_parallel == "fsdp":
            from moe_lab.parallel.fsdp import FullyShardedBaseline

            compute = DTYPES[config.precision]
            self.engine = FullyShardedBaseline(
                self.model, self.mesh, self.parallel, config.optim, decays, compute
            )
        else:
            self.engine = ShardedDataParallel(self.model, self.mesh, self.parallel, config.optim, decays)
        self.metrics = StepMetrics(config, self.model)
        self.step = 0
        self.show = show and self.rank == 0
        self.record: RunRecord | None = None
        if run_dir is not None and self.rank == 0:
            self.record = RunRecord.create(
                run_dir,
                kind="train",
                name=config.name,
                config=to_dict(config),
                layout=self.layout(),
                paths=self.paths(),
            )

    def _build_model(self) -> Transformer:
        config = self.config
        dtype = DTYPES[config.precision]
        if self.parallel.data_parallel == "fsdp" and config.precision == "bf16":
            dtype = torch.float32  # FSDP2 stores the fp32 master in shards and gathers it in bf16
        model = build(config.model, self.device, dtype, initial=not config.initial_model)
        if config.initial_model:
            load_weights(model, config.initial_model)
        return model

    def layout(self) -> dict[str, Any]:
        """The resolved layout, as the record states it."""
        p = self.parallel
        return {
            "ranks": self.ranks, "dp": p.dp, "ep": p.ep, "pp": p.pp, "microbatches": self.microbatches,
            "microbatch_tokens": self.config.microbatch_sequences * self.config.sequence_length,
            "tokens_per_step": self.config.tokens_per_step, "threads_per_rank": torch.get_num_threads(),
        }  # fmt: skip

    def paths(self) -> dict[str, Any]:
        """Which implementations run, as the record states it."""
        p = self.parallel
        fsdp = p.data_parallel == "fsdp"
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        shards = (
            f"FSDP2 over {p.fsdp_shard or p.dp} of {p.dp} ranks"
            if fsdp
            else f"DDP over {p.dp} ranks, gradients reduced once a step"
        )
        if not fsdp and p.dp > 1:
            shards += ", optimizer state sharded" if p.shard_optimizer else ", optimizer state on every rank"
        return {
            "device": name,
            "precision": "bf16 weights, fp32 masters and gradients"
            if self.config.precision == "bf16"
            else self.config.precision,
            "ops": "reference" if reference_only() else "fast",
            "transport": p.transport,
            "data_parallel": shards,
        }

    def fit(self) -> dict[str, Any]:
        """Train to the last step; returns the results that the record keeps. The record says "failed" if this raises."""
        try:
            results = self._fit()
        except BaseException as error:
            if self.record is not None:
                detail = {"type": type(error).__name__, "message": str(error), "where": f"step {self.step}"}
                self.record.finish(
                    "killed" if isinstance(error, KeyboardInterrupt) else "failed", error=detail
                )
            raise
        if self.record is not None:
            self.record.update(results=results)
            self.record.finish("done")
        return results

    def _fit(self) -> dict[str, Any]:
        config = self.config
        if self.show:
            print(f"{config.name}: {self.layout()['ranks']} ranks x {self.microbatches} microbatches of "
                  f"{config.microbatch_sequences} x {config.sequence_length} tokens; {self.paths()}", flush=True)  # fmt: skip
        before = self.sample()
        started = mark = time.perf_counter()
        marked_step, rates, evaluations = self.step, [], {}
        last: dict[str, Any] = {}
        while self.step < config.steps:
            self.train_step()
            heartbeat(f"step {self.step}")
            evaluate = config.eval_every > 0 and (
                self.step % config.eval_every == 0 or self.step == config.steps
            )
            if not (evaluate or self.step % config.log_every == 0 or self.step == config.steps):
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
            mark, marked_step = time.perf_counter(), self.step
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
            counted = sum(int((b[1] != IGNORE).sum()) for b in batches)
            labels = sum_over_ranks(torch.tensor(float(counted), device=self.device))
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

    @torch.no_grad()
    def evaluate(self, sequences: int = 0) -> float:
        """Cross-entropy in nats a label over ``sequences`` spread over the validation split (0: all), shared over the ranks."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.model.eval()
        for batch in self._validation(sequences):
            tokens, targets, documents = self._to_device(batch)
            part = cross_entropy(self.model(tokens, documents), targets)
            sums += torch.stack([part.cross_entropy.double(), part.labels.double()])
        self.model.train()
        loss, labels = sum_over_ranks(sums).tolist()
        return loss / labels

    def sample(self) -> str | None:
        """Text that the model goes on with after a fixed prompt, on rank 0; None on the others."""
        if self.rank != 0:
            return None
        tokenizer = self.tokens.tokenizer()
        prompt = [int(i) for i in tokenizer.encode(SAMPLE_PROMPT)]
        ids = generate(self.model, prompt, SAMPLE_TOKENS, context=self.config.sequence_length)
        return tokenizer.decode([i for i in ids if i < tokenizer.vocab_size])

    def _save(self) -> dict[str, Any]:
        if self.record is None:
            return {}
        return {"model": str(save_model(self.model, self.record.folder / "model"))}


def check_supported(config: TrainConfig) -> None:
    """Refuse what this version cannot train, with one sentence, before anything starts."""
    p = config.parallel
    if config.precision not in DTYPES:
        raise ConfigError(
            f"TrainConfig.precision is {config.precision!r}, which this version describes but cannot train in: use {', '.join(DTYPES)}"
        )
    if p.data_parallel == "fsdp" and world()[1] == 1:
        raise ConfigError(
            "ParallelConfig.data_parallel is 'fsdp', which shards weights over ranks and needs at least 2, but this is 1"
        )
    if p.ep > 1 or p.pp > 1 or p.transport != "local" or p.recompute != "none":
        raise ConfigError(
            f"ParallelConfig asks for ep {p.ep}, pp {p.pp}, transport {p.transport!r} and recompute {p.recompute!r}, which this version "
            "describes but cannot train with: use ep=1 pp=1 transport=local recompute=none"
        )
