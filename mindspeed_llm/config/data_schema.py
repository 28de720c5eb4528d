"""The section ``data`` of a configuration file, and what describes one data set.

The docstring under a field is its documentation, as in ``schema.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, NonNegativeInt, PositiveInt, Tag

from mindspeed_llm.config.types import BlendedFiles, Bool, ColumnRole, Float, Floats, Section, TagName


class DatasetSource(Section):
    """One data set: the value of `data.dataset` when it is a mapping, and an entry of `dataset_info.json`."""

    file_name: str | BlendedFiles
    """A file (json, jsonl, parquet, csv, arrow, txt) or a folder of them. With `data_manager_type: mg` the path of
    `.bin` and `.idx` files without the ending, or a blend of such: `[0.3, PATH, 0.7, PATH]`, `{PATH: 0.3, PATH: 0.7}`
    or, in proportion to their sizes, `[PATH, PATH]`."""
    formatting: Literal["alpaca", "sharegpt", "openai"] = "alpaca"
    """How a row is laid out: instruction columns, or a list of messages."""
    columns: dict[ColumnRole, str] = Field({})
    """Column of each part of a row, where it differs from the format's usual one."""
    tags: dict[TagName, str] = Field({})
    """Names inside a message, where they differ from the format's usual ones."""
    num_samples: PositiveInt | None = None
    """Number of rows to take from this data set; null: all."""


Dataset = Annotated[
    Annotated[str, Tag("<names>")] | Annotated[DatasetSource, Tag("<mapping>")],
    Discriminator(lambda value: "<mapping>" if isinstance(value, dict | DatasetSource) else "<names>"),
]
"""The tags keep errors apart: they concern either the names or a key of the mapping."""


class DataConfig(Section):
    """Training and evaluation data."""

    dataset: Dataset
    """The training data: a mapping (see `data.dataset`) or comma-separated names from `dataset_info.json`."""
    eval_dataset: Dataset | None = None
    """The evaluation data, given like `dataset`."""
    dataset_dir: str = "data"
    """Folder of `dataset_info.json`, used when data sets are given by name."""
    data_manager_type: Literal["lf", "mg"] = "lf"
    """`mg`: `data.dataset.file_name` is the path of Megatron's `.bin` and `.idx` files without the ending; where there
    are none, and with `lf`, it is read as rows or text."""
    split: str = "100,0,0"
    """Proportions in which `.bin` and `.idx` files are cut: documents to train on, to evaluate on, to leave alone."""
    reset_attention_mask: Bool = False
    """With `training.parity: megatron`: documents of a sample do not see each other. Without it they never do."""
    reset_position_ids: Bool = False
    """With `training.parity: megatron`: positions begin again with every document. Without it they always do."""
    eod_mask_loss: Bool = False
    """With `training.parity: megatron`: no end of a document predicts the next one. Without it none ever does."""
    template: str | None = None
    """Chat template for SFT (`qwen3`, `chatml`, `llama3`, ...); null: the tokenizer's own."""
    cutoff_len: PositiveInt = 2048
    """Longest sequence, in tokens."""
    train_on_prompt: Bool = False
    """Compute the loss on the prompt too."""
    mask_history: Bool = False
    """Compute the loss on the last answer of a conversation only."""
    drop_overlong: Bool = False
    """Leave out conversations that are longer than `cutoff_len` instead of cutting them off."""
    tool_format: str | None = None
    """How tool calls are written (`default`, `qwen`, `llama3`, `mistral`, `glm4`, `minimax1`, `minimax2`, `deepseek`,
    `kimi`, `harmony`); null: as the template does."""
    default_system: str | None = None
    """System prompt of conversations that have none; null: the template's."""
    enable_thinking: Bool | None = True
    """Templates of reasoning models: true or false forces thinking on or off, null leaves rows as they are."""
    packing: Bool = False
    """Put several samples into one sequence of `cutoff_len` tokens; they don't see each other."""
    neat_packing: Bool = False
    """The same as `packing`; the two differ in `training.parity: llamafactory` only, where plain packing leaks."""
    max_samples: PositiveInt | None = None
    """Take only the first rows of every data set (for a quick try)."""
    mix_strategy: Literal["concat", "interleave_under", "interleave_over"] = "concat"
    """How several data sets are put together: one after the other, or a row of each in turn until the first
    (`interleave_under`) or the last (`interleave_over`) has come to its end; the others then begin again."""
    interleave_probs: Floats | None = None
    """Probabilities with which interleaving draws the data set of the next row; null: they take turns."""
    val_size: Float = Field(0.0, ge=0)
    """Part of the training data set aside for evaluation: a fraction below 1, or a number of rows."""
    eval_on_each_dataset: Bool = False
    """Report the loss of each evaluation data set by itself."""
    streaming: Bool = False
    """Prepare rows while training on those before them, instead of all of them before the first step."""
    buffer_size: PositiveInt = 16384
    """With `streaming`: rows that are shuffled together, of all ranks."""
    max_bad_rows: NonNegativeInt | None = None
    """Rows that cannot be used are skipped and reported; more of them than this are an error; null: any number."""
    preprocessing_num_workers: PositiveInt | None = None
    """Processes that prepare the data; null: one."""
    preprocessing_batch_size: PositiveInt = 1000
    """Rows handed to a preparing process at a time; packing fills sequences within them."""
    tokenized_path: str | None = None
    """Folder that keeps prepared data for later runs; null: `prepared_data` in `output_dir`."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.interleave_probs is not None:
            yield from self._contradictions_of_probs(self.interleave_probs)
        if self.val_size and self.eval_dataset is not None:
            yield "val_size", f"{self.val_size:g} and eval_dataset are both given; drop one"
        if self.eval_on_each_dataset and self.eval_dataset is None:
            yield "eval_on_each_dataset", "there is no eval_dataset whose data sets could be told apart"
        if self.val_size > 1 and self.val_size != int(self.val_size):
            yield "val_size", f"{self.val_size:g} is neither a fraction below 1 nor a whole number of rows"
        if self.mask_history and self.train_on_prompt:
            yield "mask_history", "the loss cannot leave out earlier turns and count the prompt: drop train_on_prompt"
        if self.data_manager_type == "lf" and self.split != "100,0,0":
            yield "split", "cuts the files of data_manager_type: mg; use val_size"
        if self.reset_attention_mask and not self.reset_position_ids:
            yield "reset_attention_mask", "is told from the positions: set reset_position_ids too"
        for name, source in (("dataset", self.dataset), ("eval_dataset", self.eval_dataset)):
            is_blend = isinstance(source, DatasetSource) and not isinstance(source.file_name, str)
            if is_blend and (name == "eval_dataset" or self.data_manager_type == "lf"):
                yield name, "a blend is for the .bin and .idx files of data_manager_type: mg"
        if self.streaming:
            yield from self._contradictions_of_streaming()

    def _contradictions_of_streaming(self) -> Iterator[tuple[str, str]]:
        if self.val_size:
            yield "val_size", "streaming does not know the rows that could be set aside; give an eval_dataset"
        if self.max_samples is not None:
            yield "max_samples", "streaming reads only what training.max_steps need; drop max_samples"
        if self.data_manager_type == "mg":
            yield "streaming", "is for rows and text; .bin and .idx files (data_manager_type: mg) need no preparation"

    def _contradictions_of_probs(self, probs: list[float]) -> Iterator[tuple[str, str]]:
        if self.mix_strategy == "concat":
            yield "interleave_probs", "is for mix_strategy: interleave_under or interleave_over, not concat"
        if min(probs, default=0) <= 0 or abs(sum(probs) - 1) > 1e-6:
            yield "interleave_probs", f"must be positive and add up to 1, got {probs}, which adds up to {sum(probs):g}"
        for key, names in (("dataset", self.dataset), ("eval_dataset", self.eval_dataset)):
            count = len(names.split(",")) if isinstance(names, str) else 1
            is_mixed = count > 1 and not (key == "eval_dataset" and self.eval_on_each_dataset)
            if count != len(probs) and (is_mixed or key == "dataset"):
                yield "interleave_probs", f"has {len(probs)} probabilities, but {key} names {count} data sets"
