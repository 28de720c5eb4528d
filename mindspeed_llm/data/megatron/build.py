"""From the configuration to the data sets of a ``.bin``/``.idx`` pair."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.config import Config, DatasetSource
from mindspeed_llm.data.megatron.gpt_dataset import GptDataset
from mindspeed_llm.data.megatron.indexed import IndexedTokens, index_path
from mindspeed_llm.data.megatron.indices import build_order, split_documents
from mindspeed_llm.errors import ConfigError, DataError


def indexed_prefix(config: Config) -> str | None:
    """The prefix of the ``.bin``/``.idx`` pair to train on; None where the data is text that must be tokenised."""
    data = config.data
    prefix = data.dataset.file_name if isinstance(data.dataset, DatasetSource) else ""
    if data.data_manager_type == "mg" and index_path(prefix).exists():
        return prefix
    if any(_weights(data.split)[1:]):
        raise ConfigError(
            f"data.split: {data.split!r} cuts only .bin and .idx files, and there is no {index_path(prefix)}; "
            "use data.val_size"
        )
    if config.training.parity == "megatron":
        raise ConfigError(
            "training.parity: megatron needs the .bin and .idx files of Megatron's run: set data.data_manager_type to "
            "mg and data.dataset.file_name to their path without the ending"
        )
    return None


def build_splits(config: Config, prefix: str) -> dict[str, GptDataset]:
    """``train`` and, where ``data.split`` gives it a share, ``eval``. Megatron's third part, ``test``, is left alone.

    Every process builds the same order by itself: it takes a second for millions of documents, and no file is shared.
    """
    data, training = config.data, config.training
    _reject_other_splits(config)
    weights = _weights(data.split)
    tokens = IndexedTokens(prefix)
    count = min(len(tokens), data.max_samples or len(tokens))
    splits = {}
    for name, weight, documents in zip(("train", "eval"), weights, split_documents(count, weights), strict=False):
        if name == "eval" and not weight:
            continue
        size = int(tokens.lengths[documents.start : documents.stop].sum(dtype="int64"))
        if not size:
            raise DataError(
                f"data.split: {data.split} leaves no documents with tokens to {name}, of {count} in {Path(prefix).name}"
            )
        order = build_order(
            tokens.lengths,
            documents,
            sequence_length=data.cutoff_len,
            seed=None if training.disable_shuffling else training.seed,
            num_samples=_samples_wanted(config, size) if name == "train" else None,
        )
        if not len(order.shuffle_index):
            raise DataError(
                f"data {name}: {size} tokens of {len(documents)} documents are too few for one sample of "
                f"data.cutoff_len + 1 = {data.cutoff_len + 1} tokens"
            )
        splits[name] = GptDataset(tokens, order, leak=training.parity == "megatron")
    return splits


def _samples_wanted(config: Config, tokens: int) -> int:
    """Samples of the whole run: those of ``max_steps``, as Megatron counts them, or of ``num_train_epochs``."""
    training, parallel = config.training, config.parallel
    if training.max_steps > 0:
        ranks = (parallel.fsdp_size or 1) * (parallel.dp_replicate_size or 1)
        rows_per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps * ranks
        return training.max_steps * rows_per_step
    return (int(training.num_train_epochs * tokens) - 1) // config.data.cutoff_len


def _reject_other_splits(config: Config) -> None:
    data = config.data
    for key, given in (
        ("data.val_size", data.val_size),
        ("data.eval_dataset", data.eval_dataset),
        ("data.dataset.num_samples", isinstance(data.dataset, DatasetSource) and data.dataset.num_samples),
    ):
        if given:
            raise ConfigError(f"{key}: not for .bin/.idx files; data.split cuts them")


def _weights(split: str) -> list[float]:
    """The proportions of train, valid and test."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 0 < len(weights) <= 3 or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise ConfigError(f"data.split: {split!r} is not up to three proportions for train, valid and test: 969,30,1")
    return weights + [0.0] * (3 - len(weights))
