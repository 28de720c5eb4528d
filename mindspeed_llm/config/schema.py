"""The five sections of a configuration file and every key in them.

The docstring under a field is its documentation: ``docs/configuration.md`` is generated from it. Names, types and
defaults are those of MindSpeed LLM's FSDP2 backend wherever it has the key; ``original.py`` lists its other keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt

from mindspeed_llm.config.data_schema import DataConfig
from mindspeed_llm.config.types import Bool, DType, Float, Section


class ModelConfig(Section):
    """Which model and tokenizer."""

    model_name_or_path: str
    """Folder with the model's `config.json` and, unless `train_from_scratch`, its safetensors."""
    tokenizer_name_or_path: str | None = None
    """Folder with the tokenizer; null: `model_name_or_path`."""
    model_id: str | None = None
    """Name of a model class registered by a plugin; null: the class that the model's `config.json` names."""
    plugins: list[str] = Field([])
    """Python modules to import first; they may register models (`mindspeed_llm.models.registry`) and templates."""
    train_from_scratch: Bool = False
    """Initialise the weights at random (from `training.seed`) instead of loading them."""
    trust_remote_code: Bool = False
    """Allow model and tokenizer code that comes with the model folder to run."""
    use_fast_tokenizer: Bool = True
    """Use the tokenizer written in Rust where there is one."""
    split_special_tokens: Bool = False
    """Tokenise text in the data that looks like a special token as plain text."""
    attn_implementation: str | None = None
    """`mindspeed` (fused attention), or one of transformers' (`sdpa`, `eager`, ...); null: fused attention on a CPU if
    `optimization.use_flash_attn`, else the best one of transformers."""


class ParallelConfig(Section):
    """How the model and the data are spread over the ranks: dp_replicate_size x fsdp_size = number of ranks."""

    fsdp_size: PositiveInt | None = None
    """Ranks that share one copy of the parameters; null: all of them / `dp_replicate_size`."""
    dp_replicate_size: PositiveInt | None = None
    """Copies of the parameters (HSDP); null: number of ranks / `fsdp_size`."""
    ep_size: PositiveInt = 1
    """Expert parallelism: ranks that divide the experts of a layer among themselves; tokens travel to them."""
    ep_fsdp_size: PositiveInt | None = None
    """Ranks that shard each expert's parameters; null, as well as without expert parallelism: `fsdp_size / ep_size`."""
    ep_dispatcher: Literal["eager", "fused", "mc2"] = "eager"
    """How tokens travel: all at once (`eager`), or in two halves, of which one travels while the other is computed
    (`fused`; `mc2` means the same)."""
    cp_size: PositiveInt = 1
    """Context parallelism: ranks that divide every sequence among themselves; `fsdp_size` counts them too."""
    cp_type: Literal["ulysses", "ring", "hybrid"] = "ulysses"
    """How attention sees the whole sequence: each rank gets all tokens of some heads (`ulysses`), keys and values
    travel round (`ring`), or both (`hybrid`)."""
    ulysses_size: PositiveInt | None = None
    """Ranks that divide the heads with `cp_type: hybrid`, in `cp_size / ulysses_size` rings."""
    fsdp_modules: list[str] | None = None
    """Modules that are sharded as one unit each, by pattern (`model.layers.{*}`); null: derived from the model."""
    ignored_modules: list[str] | None = None
    """Modules that are not sharded, by pattern."""
    reshard_after_forward: Bool = True
    """Free a unit's gathered parameters after its forward pass."""
    num_to_forward_prefetch: NonNegativeInt = 1
    """Units gathered ahead in the forward pass."""
    num_to_backward_prefetch: NonNegativeInt = 1
    """Units gathered ahead in the backward pass."""
    param_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type that the model computes in; the master weights are float32."""
    reduce_dtype: DType = "fp32"
    """Type in which gradients are summed over ranks."""
    recompute: Bool = False
    """Drop activations in the forward pass and compute them again in the backward pass."""
    recompute_mode: Literal["full", "selective"] = "full"
    """`selective` keeps what attention and fused experts return and what ranks send each other for them: their work is
    not done twice."""
    recompute_modules: list[str] | None = None
    """Modules to recompute, by pattern; null: the decoder layers."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if (self.cp_type == "hybrid") != (self.ulysses_size is not None):
            yield "ulysses_size", f"belongs to cp_type: hybrid, and only to it; cp_type is {self.cp_type}"
        if self.cp_size % (self.ulysses_size or 1):
            yield "ulysses_size", f"{self.ulysses_size} does not divide cp_size {self.cp_size}"


class TrainingConfig(Section):
    """The run: steps, optimizer, schedule, checkpoints."""

    output_dir: str
    """Folder for everything that the run writes."""
    stage: Literal["pt", "sft"] = "sft"
    """Pretraining on raw text, or supervised fine-tuning."""
    seed: NonNegativeInt = 42
    """Seed of the weights, the order of the data and everything else that is random."""
    deterministic: Bool = True
    """Use only algorithms whose results do not vary from run to run."""
    compile: Bool = False
    """Compile the decoder layers with `torch.compile`; the first steps then take minutes."""
    parity: Literal["none", "llamafactory", "megatron"] = "none"
    """Reproduce another system to the digit, its quirks included."""

    num_train_epochs: Float = Field(3.0, gt=0)
    """Passes over the training data; fractions are allowed."""
    max_steps: int = -1
    """Optimizer steps to take, whatever the epochs; -1: as many as `num_train_epochs` makes."""
    per_device_train_batch_size: PositiveInt = 8
    """Sequences per rank in a micro-batch."""
    max_tokens_per_batch: PositiveInt | None = None
    """Instead of `per_device_train_batch_size`: a micro-batch has as many rows, of similar length, as so many tokens
    hold, padding counted."""
    per_device_eval_batch_size: PositiveInt = 8
    """Sequences per rank in a batch of the evaluation."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step."""
    disable_shuffling: Bool = False
    """Take the rows in their order in the file."""
    dataloader_num_workers: NonNegativeInt = 0
    """Processes that put batches together; 0: the training process does."""
    dataloader_drop_last: Bool = False
    """Leave out the last, smaller step of an epoch."""

    lr: Float = Field(1e-5, ge=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up; `wsd`: it stays at the peak and falls at the end."""
    wsd_decay_steps: PositiveInt | None = None
    """Number of steps in which the learning rate falls with `wsd`; null: a tenth of all."""
    wsd_decay_style: Literal["linear", "minus_sqrt"] = "minus_sqrt"
    """How it falls with `wsd`: in a line, or fast and then slower, as 1 - sqrt."""
    warmup_ratio: Float | None = Field(None, ge=0, le=1)
    """Part of all steps in which the learning rate rises from 0; null: 0.03 unless `warmup_steps` is given."""
    warmup_steps: NonNegativeInt | None = None
    """Number of steps in which the learning rate rises from 0."""
    min_lr: Float = Field(1e-6, ge=0)
    """Learning rate at the end of the schedule (unless it is constant)."""
    weight_decay: Float = Field(0.01, ge=0)
    """Decoupled weight decay of AdamW; norms and biases get none."""
    optimizer: Literal["adamw", "fused_adamw", "muon"] = "adamw"
    """AdamW, always in one fused pass, or Muon for the matrices of the layers (experts one by one, routers not) and
    AdamW for all else. Muon's updates are as large as AdamW's: the same lr and weight_decay fit."""
    adam_beta1: Float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of the gradients."""
    adam_beta2: Float = Field(0.95, ge=0, lt=1)
    """Decay of the mean of the squared gradients."""
    adam_epsilon: Float = Field(1e-8, gt=0)
    """Added to the root of the mean square."""
    max_grad_norm: Float = Field(1.0, ge=0)
    """Gradients are scaled down to this norm; 0: never."""
    max_nonfinite_steps: NonNegativeInt = 3
    """Steps in a row with a loss or gradient that is not finite (they are skipped) before the run stops."""
    router_aux_loss_coef: Float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of a mixture-of-experts model; 0: without it."""
    router_bias_update_rate: Float = Field(0.0, ge=0)
    """Balance experts without a loss, as DeepSeek-V3 does (there 0.001): after every step the bias that its routers add
    when they choose grows by this for experts with less than the mean load, and falls for the others; 0: it stays."""

    logging_steps: PositiveInt = 1
    """Steps between two lines of progress."""
    eval_steps: PositiveInt | None = None
    """Steps between two evaluations; null: at the end of every epoch."""
    save_steps: NonNegativeInt = 500
    """Steps between two checkpoints; the last step gets one too. 0: none, unless a signal stops the run."""
    save_total_limit: PositiveInt | None = 3
    """Checkpoints to keep, older ones are deleted; null: all."""
    save_only_model: Bool = False
    """Checkpoints hold the model only: smaller, but a run cannot be resumed from them."""
    save_on_signal: Bool = True
    """On SIGTERM or SIGINT finish the step and save a checkpoint before leaving."""
    save_hf_weights: Bool = True
    """Export the trained model to `hf/` at the end."""
    sample_prompt: str | None = None
    """A prompt that the exported model answers at the end, loaded by plain transformers; null: none."""
    resume_from_checkpoint: str | None = None
    """`auto`: the newest complete checkpoint in `output_dir`, if there is one; or the path of a checkpoint."""

    profile: Bool = False
    """Trace steps with PyTorch's profiler, or torch_npu's on an NPU."""
    profile_step_start: NonNegativeInt = 0
    """The first step to trace; the run's first is 0."""
    profile_step_end: int = Field(-1, ge=-1)
    """The step after the last one to trace; -1: to the end."""
    profile_ranks: list[int] = Field([-1])
    """Ranks that trace; [-1]: all."""
    profile_level: Literal["level_none", "level0", "level1", "level2"] = "level0"
    """How much torch_npu records of the NPU."""
    profile_with_cpu: Bool = False
    """Record what the host does besides the device."""
    profile_with_stack: Bool = False
    """Record where in Python each operator was called."""
    profile_with_memory: Bool = False
    """Record allocations."""
    profile_record_shapes: Bool = False
    """Record the operators' shapes."""
    profile_save_path: str = "./profile"
    """Folder for the traces."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.max_steps != -1 and self.max_steps < 1:
            yield "max_steps", f"must be at least 1, or -1 for as many as the epochs make; got {self.max_steps}"
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            yield "warmup_steps", f"{self.warmup_steps} and warmup_ratio {self.warmup_ratio:g} are both given; drop one"
        if self.lr_scheduler_type != "constant" and self.min_lr > self.lr > 0:
            yield "min_lr", f"{self.min_lr:g} is above lr {self.lr:g}: the learning rate would rise; lower min_lr"
        if self.lr_scheduler_type != "wsd" and self.wsd_decay_steps is not None:
            yield "wsd_decay_steps", f"is for lr_scheduler_type: wsd, not {self.lr_scheduler_type}"
        if -1 < self.profile_step_end <= self.profile_step_start:
            yield (
                "profile_step_end",
                f"{self.profile_step_end} is not after profile_step_start {self.profile_step_start}",
            )


class OptimizationConfig(Section):
    """Fused operators. Each is used only where it was proved equal to the model's own code."""

    use_fused_rmsnorm: Bool = True
    """Fused RMSNorm, with and without a gate."""
    use_fused_rotary_pos_emb: Bool = True
    """Fused rotary position embedding."""
    use_fused_swiglu: Bool = True
    """Fused SwiGLU."""
    use_flash_attn: Bool = True
    """Fused attention on a CPU or NPU, unless `model.attn_implementation` names another."""
    use_flash_gdn: Bool = True
    """Fused linear attention (gated delta rule and convolution), which also keeps packed documents apart."""
    fix_router: Bool = False
    """Send tokens to all experts in turn, whatever the router says: equal loads, for benchmarks only."""
    moe_grouped_gemm: Bool = True
    """Fused experts: all of a layer's experts in grouped matrix products, tokens sorted by expert."""
    chunk_loss_size: NonNegativeInt | None = None
    """Tokens whose logits are held at a time while the head computes the loss, where the model returns its head's
    output unchanged; null chooses a size that takes half the memory of the head, 0 holds the logits of all tokens, as
    runs with training.parity always do."""


class Config(Section):
    """A run's whole configuration."""

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    optimization: OptimizationConfig = OptimizationConfig()

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.data.data_manager_type == "mg" and self.training.stage != "pt":
            yield "training", f"stage {self.training.stage} has no use for data.data_manager_type: mg; set stage: pt"
        if self.model.attn_implementation is not None and self.parallel.cp_size > 1:
            yield "parallel", "cp_size brings an attention implementation of its own: drop model.attn_implementation"
        if self.training.compile and self.parallel.recompute and self.parallel.recompute_mode == "selective":
            yield "training", "compile hides from parallel.recompute_mode: selective what it would keep; drop one"
        if self.training.max_tokens_per_batch is not None:
            for key, given in (
                ("data.streaming", self.data.streaming),
                ("data.data_manager_type: mg", self.data.data_manager_type == "mg"),
                (f"training.parity: {self.training.parity}", self.training.parity != "none"),
            ):
                if given:
                    yield "training", f"max_tokens_per_batch does not go with {key}; set per_device_train_batch_size"
        if self.data.streaming and self.training.max_steps < 1:
            yield "training", "data.streaming has no epochs that could be counted: set max_steps"
        if self.data.streaming and self.training.parity != "none":
            yield "training", f"parity: {self.training.parity} is for prepared data: drop data.streaming"

    def dump_yaml(self) -> str:
        """The configuration with every default filled in; reading it again gives an equal one."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)
