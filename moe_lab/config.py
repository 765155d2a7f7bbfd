"""What is to be trained, as plain typed data.

Every class is frozen, checks itself when it is made, and turns into JSON and back (``fields.to_dict``,
``fields.from_dict``). A wrong value is a :class:`~moe_lab.errors.ConfigError` that names the field, the value and what
is allowed; nothing is launched or written before that.

Sources: shapes and options of the Olmo-core 3.0.0 reference scripts; the technical report, sections 10 (routing),
20 (shared experts) and 21 (merge rule). Lesson: 00_start_here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from moe_lab.errors import ConfigError
from moe_lab.fields import at_least, check_types, fail

Gating = Literal["softmax", "sigmoid", "topk_softmax"]
Merge = Literal["olmo", "unit_sum", "equal_mass", "width_proportional"]
Placement = Literal["peri", "pre", "post"]
QKNorm = Literal["none", "head", "full"]
BalanceScope = Literal["microbatch", "sequence"]
Assignment = Literal["learned", "random", "uniform"]
Schedule = Literal["constant", "cosine", "wsd"]
Precision = Literal["fp64", "fp32", "bf16", "mxfp8", "fp8_rowwise"]
Transport = Literal["local", "all_to_all", "rowwise", "deepep"]
Recompute = Literal["none", "block"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Causal grouped-query attention: ``n_heads`` query heads share ``n_kv_heads`` key and value heads.

    ``head_dim`` need not be ``d_model / n_heads``. ``qk_norm``: RMSNorm on queries and keys, one gain vector shared by
    all heads ("head", as in Olmo-core 3), over all heads together ("full", as in OLMoE), or none.
    ``window``: each query sees itself and the ``window - 1`` positions before it (0: all of them), except in the
    layers of ``full_layers``; with ``rope_in_full_layers`` false those layers carry no position at all (as in AFMoE).
    ``gate``: a sigmoid gate on the attention output, computed from its input.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    qk_norm: QKNorm = "head"
    rope_theta: float = 500_000.0
    window: int = 0
    full_layers: tuple[int, ...] = ()
    rope_in_full_layers: bool = True
    gate: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, 1, "n_heads", "n_kv_heads", "head_dim")
        at_least(self, 0, "window")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"AttentionConfig.n_heads is {self.n_heads}, which {self.n_kv_heads} key/value heads do not divide"
            )
        if self.head_dim % 2:
            fail(self, "head_dim", "even, since RoPE turns pairs")
        if self.rope_theta <= 0:
            fail(self, "rope_theta", "above 0")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Router, routed experts and the shared expert of every MoE layer.

    ``gating``: scores are a softmax over all experts, a sigmoid each, or a softmax over the K selected logits only.
    ``normalize_weights``: divide the K selected scores of a token by their sum (p sums to 1).
    ``merge``: how routed outputs f_i and the shared output g add up, y = sum_i r_i f_i + s g (report, section 21).
    "olmo" (default) is r = K p and s = 1: with uniform p this is exactly a dense MLP of the active width, so the
    initial scale matches it. "unit_sum" is r = p, s = 1; "equal_mass" r = p/2, s = 1/2; "width_proportional" splits a
    sum of 1 by width, r = p K F/(K F + F_s), s = F_s/(K F + F_s). ``routed_scale`` multiplies r once more.
    ``balance_loss``: weight of N sum_i f_i P_i, which is 1 at balance; ``balance_scope``: the tokens it is taken over.
    ``router_z_loss``: weight of mean(logsumexp(logits)^2). ``selection_bias``: a buffer added to the scores for the
    choice of experts only. ``assignment``: "random" and "uniform" replace the choice in benchmarks.
    """

    n_experts: int
    top_k: int
    expert_hidden: int
    shared_hidden: int = 0
    gating: Gating = "softmax"
    normalize_weights: bool = True
    merge: Merge = "olmo"
    routed_scale: float = 1.0
    balance_loss: float = 0.01
    balance_scope: BalanceScope = "microbatch"
    router_z_loss: float = 0.0
    selection_bias: bool = False
    assignment: Assignment = "learned"

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, 1, "n_experts", "top_k", "expert_hidden")
        at_least(self, 0, "shared_hidden", "balance_loss", "router_z_loss")
        if self.top_k > self.n_experts:
            raise ConfigError(
                f"MoEConfig.top_k is {self.top_k}, but there are only {self.n_experts} experts to choose from"
            )
        if self.assignment != "learned" and self.gating == "topk_softmax":
            raise ConfigError(
                f"MoEConfig.assignment is {self.assignment!r}, which needs scores over all {self.n_experts} experts, "
                "but gating topk_softmax scores only the selected ones: use softmax or sigmoid"
            )

    @property
    def active_hidden(self) -> int:
        """Width of the dense MLP with as many active parameters: K F + F_s."""
        return self.top_k * self.expert_hidden + self.shared_hidden

    def merge_coefficients(self) -> tuple[float, float]:
        """(routed, shared): r_i = routed * p_i and s = shared, for the rule named by ``merge``."""
        routed_share = self.top_k * self.expert_hidden / self.active_hidden
        routed, shared = {
            "olmo": (float(self.top_k), 1.0),
            "unit_sum": (1.0, 1.0),
            "equal_mass": (0.5, 0.5),
            "width_proportional": (routed_share, 1.0 - routed_share),
        }[self.merge]
        return routed * self.routed_scale, shared


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer: ``n_layers`` blocks, each attention and a feed-forward part (dense MLP or MoE layer).

    ``dense_layers``: indices of the blocks whose feed-forward part is one SwiGLU MLP of width ``dense_hidden``.
    ``moe`` is None for a model without experts. ``norm_placement``: RMSNorm before each part ("pre"), after it and
    before the residual is added ("post"), or both ("peri", four norms a block). ``embed_scale`` multiplies embeddings
    by sqrt(d_model); ``embed_norm`` is an RMSNorm after that. Initial weights: normal with ``init_std``, truncated at
    3 standard deviations, a function of (``init_seed``, parameter name, expert index) alone.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    attention: AttentionConfig
    moe: MoEConfig | None = None
    dense_layers: tuple[int, ...] = ()
    dense_hidden: int = 0
    norm_placement: Placement = "peri"
    norm_eps: float = 1e-6
    embed_scale: bool = True
    embed_norm: bool = True
    tie_embeddings: bool = False
    init_std: float = 0.01
    init_seed: int = 2026

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, 1, "vocab_size", "d_model", "n_layers")
        if self.norm_eps <= 0:
            fail(self, "norm_eps", "above 0")
        if self.init_std <= 0:
            fail(self, "init_std", "above 0")
        for name, layers in (
            ("dense_layers", self.dense_layers),
            ("attention.full_layers", self.attention.full_layers),
        ):
            outside = [i for i in layers if not 0 <= i < self.n_layers]
            if outside or len(set(layers)) != len(layers):
                raise ConfigError(
                    f"ModelConfig.{name} is {list(layers)}, but must be different indices from 0 to {self.n_layers - 1}"
                )
        if self.moe is None and len(self.dense_layers) != self.n_layers:
            raise ConfigError(
                f"ModelConfig.moe is none, so all {self.n_layers} layers must be in dense_layers, but {len(self.dense_layers)} are"
            )
        if self.dense_layers and self.dense_hidden < 1:
            fail(self, "dense_hidden", f"at least 1, since there are {len(self.dense_layers)} dense layers")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the blocks that hold experts."""
        return tuple(i for i in range(self.n_layers) if i not in self.dense_layers)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from: ``source`` is a text file or a folder made by ``moe-lab data prepare``.

    ``seed`` shuffles. ``mask_documents``: attention stays inside a document, and the label that would predict the
    first token of the next document is left out (ignore index -100).
    """

    source: str
    tokenizer: Literal["byte", "bpe"] = "byte"
    val_fraction: float = 0.05
    seed: int = 34521
    mask_documents: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if not self.source:
            fail(self, "source", "the path of a text file or of a prepared folder")
        if not 0 < self.val_fraction < 1:
            fail(self, "val_fraction", "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with decoupled weight decay, clipping by one global norm, and a learning-rate schedule over steps.

    The rate rises linearly over ``warmup_steps``; then "constant" holds it, "cosine" lowers it to ``final_fraction``
    of ``lr`` where the steps end, and "wsd" holds it and lowers it linearly to that over the last ``decay_steps``.
    ``no_decay``: parameters without weight decay, "norm" (all gains) and "embedding" (the input table). ``skip_sigma``:
    leave out a step whose loss or gradient norm exceeds the mean of the last 128 by that many standard deviations (0: none).
    """

    lr: float
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    final_fraction: float = 0.1
    no_decay: tuple[Literal["norm", "embedding"], ...] = ("embedding", "norm")
    skip_sigma: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, 0, "weight_decay", "warmup_steps", "decay_steps", "final_fraction", "skip_sigma")
        for name in ("lr", "eps", "max_grad_norm"):
            if getattr(self, name) <= 0:
                fail(self, name, "above 0")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            fail(self, "betas", "two numbers, each at least 0 and below 1")
        if self.schedule == "wsd" and self.decay_steps < 1:
            fail(self, "decay_steps", "at least 1 for the wsd schedule")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks are used: world = pp x dp, with expert parallelism folded into dp (edp = dp / ep).

    ``dp`` 0 means all ranks that pp leaves. ``capacity_factor`` bounds the rows a rank receives in transports with
    fixed buffers (report, section 10.3); ``local`` and ``all_to_all`` drop nothing and ignore it.

    ``data_parallel``: "ddp" keeps whole weights on each rank and reduces gradients once a step, in buckets of ``bucket_mib``;
    with ``shard_optimizer`` each rank keeps only its share of the fp32 master and moments. "fsdp" is the baseline that it
    replaced: weights sharded over ``fsdp_shard`` ranks (0: all of dp; fewer is HSDP) and gathered for every microbatch.
    """

    dp: int = 0
    ep: int = 1
    pp: int = 1
    virtual_stages: int = 1
    transport: Transport = "local"
    capacity_factor: float = 1.25
    recompute: Recompute = "none"
    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    shard_optimizer: bool = True
    bucket_mib: int = 64
    fsdp_shard: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, 0, "dp")
        at_least(self, 1, "ep", "pp", "virtual_stages", "bucket_mib")
        at_least(self, 0, "fsdp_shard")
        if self.data_parallel == "fsdp" and (self.ep > 1 or self.pp > 1):
            raise ConfigError(
                f"ParallelConfig.data_parallel is 'fsdp', a baseline without expert or pipeline parallelism, but ep is {self.ep} and pp {self.pp}"
            )
        if self.capacity_factor <= 0:
            fail(self, "capacity_factor", "above 0")
        if self.dp and self.dp % self.ep:
            raise ConfigError(
                f"ParallelConfig.ep is {self.ep}, which does not divide dp {self.dp}: expert parallelism is folded into dp"
            )
        if self.ep > 1 and self.transport == "local":
            raise ConfigError(
                f"ParallelConfig.transport is 'local', which keeps all experts on each rank, but ep is {self.ep}"
            )

    def resolve(self, world: int) -> ParallelConfig:
        """The same with ``dp`` filled in for ``world`` ranks; :class:`ConfigError` if they do not fit."""
        if world % self.pp:
            raise ConfigError(f"ParallelConfig.pp is {self.pp}, which does not divide {world} ranks")
        dp = world // self.pp
        if self.dp not in (0, dp):
            raise ConfigError(
                f"ParallelConfig has pp {self.pp} x dp {self.dp} = {self.pp * self.dp} ranks, but {world} are running"
            )
        if self.fsdp_shard and dp % self.fsdp_shard:
            raise ConfigError(
                f"ParallelConfig.fsdp_shard is {self.fsdp_shard}, which does not divide {dp} data-parallel ranks"
            )
        return dataclasses.replace(self, dp=dp)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. Lengths are in tokens or sequences, as the field says.

    A step reads ``sequences_per_step`` sequences of ``sequence_length`` tokens, in microbatches of
    ``microbatch_sequences`` shared out over the data-parallel ranks. ``gpus``: the published number of GPUs for
    reference rows (0 where there is none); the planner and the job runner use it. ``z_loss``: weight of
    mean(logsumexp(logits)^2) over the vocabulary. ``mxfp8``: which tensors the low-precision recipes cover.
    ``eval_every`` steps (0: never), validation is read at ``eval_sequences`` sequences spread over it (0: all); the
    evaluation after the last step always reads all of it. ``sample_tokens``: length of the text samples before the first step and after
    the last (0: none).
    ``initial_model``: a model's folder whose weights training starts from; ``model`` must be its configuration, save
    for the weights of auxiliary losses and the like (``train.store.FREE``). Empty: initial weights are drawn.
    ``checkpoint_every`` steps and after the last, the whole state of the run is written (0: never); the last
    ``keep_checkpoints`` are kept (0: all). ``checkpoint_background``: from a copy in the host's memory, while training goes on.
    """

    name: str
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: Precision = "fp32"
    mxfp8: tuple[
        Literal["mlp", "attn_qkv", "attn_out", "saved_activations", "dispatch", "fp8_only_params"], ...
    ] = ()
    sequence_length: int
    sequences_per_step: int
    microbatch_sequences: int
    steps: int
    z_loss: float = 1e-4
    eval_every: int = 0
    eval_sequences: int = 0
    log_every: int = 10
    sample_tokens: int = 200
    gpus: int = 0
    initial_model: str = ""
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    checkpoint_background: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        at_least(
            self, 1, "sequence_length", "sequences_per_step", "microbatch_sequences", "steps", "log_every"
        )
        at_least(self, 0, "z_loss", "eval_every", "eval_sequences", "sample_tokens", "gpus")
        at_least(self, 0, "checkpoint_every", "keep_checkpoints")
        if self.sequences_per_step % self.microbatch_sequences:
            raise ConfigError(
                f"TrainConfig.sequences_per_step is {self.sequences_per_step}, which microbatches of "
                f"{self.microbatch_sequences} sequences do not divide"
            )
        moe = self.model.moe
        if moe and moe.n_experts % self.parallel.ep:
            raise ConfigError(
                f"ParallelConfig.ep is {self.parallel.ep}, which does not divide {moe.n_experts} experts"
            )
        if self.parallel.pp * self.parallel.virtual_stages > self.model.n_layers:
            raise ConfigError(
                f"ParallelConfig asks for pp {self.parallel.pp} x {self.parallel.virtual_stages} stages, "
                f"more than the {self.model.n_layers} layers"
            )
        if self.optim.warmup_steps + self.optim.decay_steps > self.steps:
            raise ConfigError(
                f"OptimConfig has {self.optim.warmup_steps} warm-up and {self.optim.decay_steps} decay steps, "
                f"more than TrainConfig.steps {self.steps}: raise steps or lower warmup_steps or decay_steps"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads over all ranks."""
        return self.sequences_per_step * self.sequence_length

    def microbatches_per_rank(self, dp: int) -> int:
        """Microbatches each of ``dp`` data-parallel ranks accumulates a step; :class:`ConfigError` if they do not divide."""
        total = self.sequences_per_step // self.microbatch_sequences
        if total % dp:
            raise ConfigError(
                f"a step has {total} microbatches ({self.sequences_per_step} sequences in microbatches of "
                f"{self.microbatch_sequences}), which {dp} data-parallel ranks do not share evenly"
            )
        return total // dp
