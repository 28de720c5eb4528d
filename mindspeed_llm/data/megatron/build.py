"""From the configuration to the data sets of ``.bin``/``.idx`` pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_llm.config import Config, DatasetSource
from mindspeed_llm.data.cache import code_fingerprint, fingerprint, prepare_once
from mindspeed_llm.data.megatron.gpt_dataset import BlendedDataset, GptDataset, OneText
from mindspeed_llm.data.megatron.indexed import IndexedTokens, index_path
from mindspeed_llm.data.megatron.indices import (
    SampleOrder,
    blend_all,
    blend_by_weight,
    build_order,
    normalised,
    samples_of_each,
    split_documents,
)
from mindspeed_llm.errors import ConfigError, DataError

Blend = Mapping[str, float | None]
"""Prefixes of ``.bin``/``.idx`` pairs, with their weights if they have any."""

_SURPLUS = 0.005  # more samples than a blend takes of each, as rounding may ask for some


def indexed_blend(config: Config) -> Blend | None:
    """The ``.bin``/``.idx`` pairs to train on; None where the data is text that must be tokenised."""
    data = config.data
    file_name = data.dataset.file_name if isinstance(data.dataset, DatasetSource) else ""
    blend: Blend = {file_name: None} if isinstance(file_name, str) else file_name
    if data.data_manager_type == "mg" and all(index_path(prefix).exists() for prefix in blend):
        return blend
    if any(_shares(data.split)[1:]):
        missing = next((path for path in map(index_path, blend) if not path.exists()), "data_manager_type: mg")
        raise ConfigError(
            f"data.split: {data.split!r} cuts only .bin and .idx files, and there is no {missing}; use data.val_size"
        )
    if config.training.parity == "megatron":
        raise ConfigError(
            "training.parity: megatron needs the .bin and .idx files of Megatron's run: set data.data_manager_type to "
            "mg and data.dataset.file_name to their path without the ending"
        )
    return None


class IndexedSplits:
    """Builds ``train`` and, where ``data.split`` gives it a share, ``eval``. Megatron's third part is left alone.

    Orders are kept in ``folder``: one process builds them, the others map them into memory.
    """

    def __init__(self, config: Config, blend: Blend, folder: Path, eod: int) -> None:
        self.config = config
        self.folder = folder
        self.corpora = [IndexedTokens(prefix) for prefix in blend]
        weights = [weight for weight in blend.values() if weight is not None]
        self.weights = normalised(weights) if weights else None
        data = config.data
        self.form = OneText(eod, data.reset_position_ids, data.eod_mask_loss) if _is_megatron(config) else None

    def create(self) -> dict[str, GptDataset | BlendedDataset]:
        """The data sets by name. Raises ``DataError`` where there are too few tokens."""
        _reject_other_splits(self.config)
        limit, shares = self.config.data.max_samples, _shares(self.config.data.split)
        cuts = [split_documents(min(len(tokens), limit or len(tokens)), shares) for tokens in self.corpora]
        train, evaluation, _ = zip(*cuts, strict=True)
        splits = {"train": self._train(train)}
        if shares[1]:
            splits["eval"] = self._blend(self._datasets("eval", evaluation, None))
        return splits

    def _train(self, documents: Sequence[range]) -> GptDataset | BlendedDataset:
        tokens = sum(one.count(part) for one, part in zip(self.corpora, documents, strict=True))
        wanted = _samples_wanted(self.config, tokens)
        if len(self.corpora) == 1:
            return self._datasets("train", documents, [wanted])[0]
        if self.weights is None:
            datasets = self._datasets("train", documents, None)
            return self._blend(datasets, wanted if self.config.training.max_steps > 0 else None)
        datasets = self._datasets("train", documents, samples_of_each(self.weights, wanted, _SURPLUS))
        size = sum(samples_of_each(self.weights, wanted))
        return BlendedDataset(datasets, *blend_by_weight(normalised(self.weights), size))

    @staticmethod
    def _blend(datasets: Sequence[GptDataset], wanted: int | None = None) -> GptDataset | BlendedDataset:
        """Data sets in proportion to their sizes: all of them, or as much of them as ``wanted``."""
        sizes = list(map(len, datasets))
        if len(sizes) == 1:
            return datasets[0]
        if wanted is None:
            return BlendedDataset(datasets, *blend_all(sizes))
        return BlendedDataset(datasets, *blend_by_weight(normalised(sizes), min(wanted, sum(sizes))))

    def _datasets(self, name: str, documents: Sequence[range], wanted: Sequence[int] | None) -> list[GptDataset]:
        """One data set per corpus, of at least so many samples, or of one pass over its documents."""
        counts: Sequence[int | None] = [None] * len(documents) if wanted is None else wanted
        pairs = zip(self.corpora, documents, counts, strict=True)
        return [GptDataset(tokens, self._order(name, tokens, part, count), self.form) for tokens, part, count in pairs]

    def _order(self, name: str, tokens: IndexedTokens, documents: range, num_samples: int | None) -> SampleOrder:
        data, training = self.config.data, self.config.training
        size = tokens.count(documents)
        if not size:
            raise DataError(
                f"data.split: {data.split} leaves no documents with tokens to {name}, of {len(tokens)} in {tokens.name}"
            )
        seed = None if training.disable_shuffling else training.seed

        def build(folder: Path) -> None:
            build_order(
                tokens.lengths, documents, sequence_length=data.cutoff_len, seed=seed, num_samples=num_samples
            ).save(folder)

        key = fingerprint([tokens.identity, documents, data.cutoff_len, seed, num_samples, code_fingerprint()])
        order = SampleOrder.load(prepare_once(self.folder, key, build))
        if not len(order.shuffle_index):
            raise DataError(
                f"data {name}: {size} tokens of {len(documents)} documents in {tokens.name} are too few for one sample "
                f"of data.cutoff_len + 1 = {data.cutoff_len + 1} tokens"
            )
        return order


def _is_megatron(config: Config) -> bool:
    return config.training.parity == "megatron"


def _samples_wanted(config: Config, tokens: int) -> int:
    """Samples of the whole run: those of ``max_steps``, as Megatron counts them, or of ``num_train_epochs``."""
    training, parallel = config.training, config.parallel
    if training.max_steps > 0:
        ranks = (parallel.fsdp_size or 1) * (parallel.dp_replicate_size or 1) // parallel.cp_size
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


def _shares(split: str) -> list[float]:
    """The proportions of train, valid and test."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 0 < len(weights) <= 3 or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise ConfigError(f"data.split: {split!r} is not up to three proportions for train, valid and test: 969,30,1")
    return weights + [0.0] * (3 - len(weights))
