"""``DataFactory``: from the ``data`` section of a configuration to rows of token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from mindspeed_llm.config import Config
from mindspeed_llm.data.cache import code_fingerprint, fingerprint, prepare_once, tokenizer_fingerprint
from mindspeed_llm.data.chat_template import ChatTemplateEncoder
from mindspeed_llm.data.collate import Quirks
from mindspeed_llm.data.encode import ConversationEncoder, EncodeOptions, TemplateEncoder
from mindspeed_llm.data.loader import RowDataset
from mindspeed_llm.data.megatron.build import Blend, IndexedSplits, indexed_blend
from mindspeed_llm.data.packing import cut_stream
from mindspeed_llm.data.prepare import ChunkEncoder, ConversationChunks, TextChunks, encode_chunks
from mindspeed_llm.data.report import Report
from mindspeed_llm.data.selection import Selection
from mindspeed_llm.data.sources import data_files
from mindspeed_llm.data.specs import DatasetSpec, dataset_specs
from mindspeed_llm.data.store import Row, RowWriter, TokenRows
from mindspeed_llm.data.stream_loader import StreamedData
from mindspeed_llm.data.templates import SpecialToken, Style, Template, get_template
from mindspeed_llm.data.tokenise import Tokeniser
from mindspeed_llm.data.tools import get_tool_format
from mindspeed_llm.errors import ConfigError, DataError
from mindspeed_llm.models.registry import import_plugins

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """Rows to train on and to evaluate on, and what happened on the way to them."""

    train: RowDataset | StreamedData
    eval: Mapping[str, RowDataset]
    reports: tuple[Report, ...]
    quirks: Quirks | None = None
    """For the loaders, in runs that must reproduce LLaMA-Factory."""
    shuffled: bool = False
    """The rows of ``train`` come in the order of their use: the loader must not shuffle them again."""
    epochs: int = 1
    """Passes over the documents that one pass over ``train`` makes."""

    @property
    def report(self) -> str:
        """The reports as lines for the log."""
        return "\n".join(map(str, self.reports))

    @property
    def first_row(self) -> Row:
        """Of the rows to train on."""
        return self.train.first_row() if isinstance(self.train, StreamedData) else self.train[0]

    def check_vocabulary(self, size: int) -> None:
        """Raises DataError when a stored row has a token that a model with ``size`` embeddings does not know."""
        stored = [rows for rows in (self.train, *self.eval.values()) if isinstance(rows, TokenRows)]
        largest = max((rows.largest_token for rows in stored), default=0)
        if largest >= size:
            raise DataError(
                f"the tokenizer made the token {largest}, but the model has embeddings for 0 to {size - 1} only: "
                "model.tokenizer_name_or_path is not the tokenizer of this model"
            )


class DataFactory:
    """Prepares the data of a run: reads, writes with the template, tokenises, cuts, packs, and stores the rows.

    One process of each machine prepares, all read (see ``cache.prepare_once``), so ``create`` has no collective in it
    and needs no rank. Rows and their order depend on the configuration alone, not on the number of workers or ranks.

    ``folder`` is where prepared rows are kept, ``data.tokenized_path`` or else a folder of the run's own by default.
    ``today`` is the date that some templates tell the model.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        *,
        folder: Path | None = None,
        today: date | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        own_folder = Path(config.training.output_dir) / "prepared_data"
        self.folder = folder or Path(config.data.tokenized_path or own_folder)
        self.today = today or date.today()
        self.llamafactory = config.training.parity == "llamafactory"
        import_plugins(config.model.plugins)  # may register templates

    def create(self) -> Data:
        """The prepared data. Raises ``DataError`` when there is none, with the reasons."""
        blend = indexed_blend(self.config)
        if blend is not None:
            return self._create_indexed(blend)
        splits = self._splits()
        if self.config.data.streaming:
            return self._create_streamed(*splits)
        prepared = [self._prepare(split) for split in splits]
        data, stage = self.config.data, self.config.training.stage
        quirks = None
        if self.llamafactory and stage == "sft" and (data.packing or data.neat_packing):
            quirks = Quirks(row_length=data.cutoff_len, leak=not data.neat_packing)
            if quirks.leak:
                logger.warning(
                    "training.parity: llamafactory with data.packing: the samples of a row see each other, as they do "
                    "there; data.neat_packing keeps them apart"
                )
        return Data(
            train=prepared[0][0],
            eval={split.name: rows for split, (rows, _) in zip(splits[1:], prepared[1:], strict=True)},
            reports=tuple(report for _, report in prepared),
            quirks=quirks,
        )

    def _create_indexed(self, blend: Blend) -> Data:
        """Tokens that Megatron's tools have prepared are read as they are, in its order."""
        data = self.config.data
        eod = -1 if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id
        splits = IndexedSplits(self.config, blend, self.folder, eod).create()
        quirks = None
        if data.reset_position_ids and self.config.training.parity == "megatron":
            quirks = Quirks(row_length=data.cutoff_len, leak=not data.reset_attention_mask)
        return Data(
            quirks=quirks,
            train=splits["train"],
            eval={name: rows for name, rows in splits.items() if name != "train"},
            reports=tuple(rows.report(name) for name, rows in splits.items()),
            shuffled=True,
            epochs=splits["train"].epochs,
        )

    def _create_streamed(self, train: _Split, *evaluation: _Split) -> Data:
        """Training rows are prepared while they are used; evaluation data, which is used again and again, before."""
        data, training = self.config.data, self.config.training
        for spec in train.specs:
            if spec.num_samples is not None:
                raise ConfigError(f"data set {spec.name!r}: num_samples needs all rows at hand: drop data.streaming")
        prepared = [self._prepare(split) for split in evaluation]
        return Data(
            train=StreamedData(
                specs=train.specs,
                encode=self._encoder(),
                buffer_size=data.buffer_size,
                chunk_size=data.preprocessing_batch_size,
                seed=training.seed,
                shuffle=not training.disable_shuffling,
                mix_strategy=data.mix_strategy,
                interleave_probs=data.interleave_probs,
                row_length=data.cutoff_len if training.stage == "pt" else None,
                max_bad_rows=data.max_bad_rows,
            ),
            eval={split.name: rows for split, (rows, _) in zip(evaluation, prepared, strict=True)},
            reports=tuple(report for _, report in prepared),
        )

    def _splits(self) -> list[_Split]:
        """The training rows first, then those of each evaluation data set."""
        data, stage = self.config.data, self.config.training.stage
        train = dataset_specs(data.dataset, data.dataset_dir, stage)
        if data.val_size:
            return [_Split("train", train), _Split("eval", train, is_held_out=True)]
        if data.eval_dataset is None:
            return [_Split("train", train)]
        evaluation = dataset_specs(data.eval_dataset, data.dataset_dir, stage)
        if data.eval_on_each_dataset:
            return [_Split("train", train), *(_Split(spec.name, [spec]) for spec in evaluation)]
        return [_Split("train", train), _Split("eval", evaluation)]

    def _prepare(self, split: _Split) -> tuple[TokenRows, Report]:
        folder = prepare_once(self.folder, self._key(split), partial(self._write, split))
        return TokenRows(folder), Report.load(folder / "report.json")

    def _key(self, split: _Split) -> str:
        """Names everything that the prepared rows depend on."""
        config = self.config
        files = [file.resolve() for spec in split.specs for file in data_files(spec.path)]
        template = get_template(config.data.template) if config.data.template else None
        parts: list[object] = [split, [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]]
        parts += [config.data.model_dump(exclude={"dataset_dir", "tokenized_path", "preprocessing_num_workers"})]
        parts += [config.training.stage, config.training.seed, config.model.split_special_tokens, self.llamafactory]
        parts += [template, tokenizer_fingerprint(self.tokenizer), code_fingerprint()]
        if self._writes_date(template):
            parts.append(self.today)
        return fingerprint(parts)

    def _writes_date(self, template: Template | None) -> bool:
        """Whether what is written differs from day to day."""
        if template is None:
            return "strftime_now" in str(self.tokenizer.chat_template)
        return template.is_dated or get_tool_format(self.config.data.tool_format or template.tools).is_dated

    def _write(self, split: _Split, folder: Path) -> None:
        data, seed = self.config.data, self.config.training.seed
        is_text = self.config.training.stage == "pt"
        selection = Selection(
            split.specs,
            max_samples=data.max_samples,
            seed=seed,
            mix_strategy=data.mix_strategy if len(split.specs) > 1 else "concat",
            interleave_probs=data.interleave_probs,
            fill_nulls=self.llamafactory and not is_text,
        )
        if data.val_size:
            selection.hold_out(data.val_size, seed, keep_held_out=split.is_held_out)
        report = Report(split.name, len(selection), unused_columns=[] if is_text else selection.unused_columns())
        writer = RowWriter(folder, with_labels=not is_text)
        workers = data.preprocessing_num_workers or 1
        chunks = selection.chunks(data.preprocessing_batch_size)
        for chunk in encode_chunks(self._encoder(), chunks, workers=workers, total=len(selection)):
            writer.write(chunk.input_ids, chunk.labels, chunk.lengths, chunk.row_sizes)
            report.add(chunk.tally)
            self._check_bad_rows(report)
        if is_text and not self.llamafactory:
            writer.regroup(list(cut_stream(writer.lengths, data.cutoff_len, drop_rest=False)))
        rows = writer.close()
        if not len(rows):
            files = ", ".join(str(spec.path) for spec in split.specs)
            why = report.why_empty()
            raise DataError(f"data {split.name}: none of {report.rows_read} rows of {files} can be used:\n{why}")
        usable = report.rows_read - report.skipped - report.unlabelled
        if report.truncated >= usable and not is_text:
            logger.warning("data %s: data.cutoff_len %d cuts every row short", split.name, data.cutoff_len)
        report.rows, report.documents, report.tokens = len(rows), rows.num_documents, rows.num_tokens
        report.targets = rows.num_targets
        report.save(folder / "report.json")

    def _check_bad_rows(self, report: Report) -> None:
        limit = self.config.data.max_bad_rows
        if limit is not None and report.skipped > limit:
            raise DataError(
                f"data {report.name}: more than data.max_bad_rows = {limit} rows cannot be used:\n{report.problems()}"
            )

    def _encoder(self) -> ChunkEncoder:
        data, split_special_tokens = self.config.data, self.config.model.split_special_tokens
        if self.config.training.stage == "pt":
            return self._text_encoder()
        # LLaMA-Factory keeps one token of a packed row free
        packs = data.packing or data.neat_packing
        capacity = data.cutoff_len - (packs and self.llamafactory)
        style = Style(
            default_system=data.default_system,
            enable_thinking=data.enable_thinking,
            forget_thoughts=data.mask_history,
            tool_format=data.tool_format,
            isolate_content=split_special_tokens,
            today=self.today,
            llamafactory=self.llamafactory,
        )
        options = EncodeOptions(
            cutoff_len=capacity,
            train_on_prompt=data.train_on_prompt,
            mask_history=data.mask_history,
            drop_overlong=data.drop_overlong,
            llamafactory=self.llamafactory,
            style=style,
        )
        encode: ConversationEncoder
        end = self.tokenizer.eos_token or ""
        if data.template is None:
            encode = ChatTemplateEncoder(self.tokenizer, options, split_special_tokens=split_special_tokens)
        else:
            template = get_template(data.template)
            tokeniser = Tokeniser(self.tokenizer, eos=template.eos, split_special_tokens=split_special_tokens)
            encode = TemplateEncoder(template, tokeniser, options)
            end = template.eos or end
        if self.llamafactory or split_special_tokens:  # the data's text is then no token
            end = ""
        return ConversationChunks(encode, options, capacity if packs else None, end=end)

    @property
    def end_of_answers(self) -> int | None:
        """The token that answers are trained to end with; None where there are no answers or no such token."""
        if self.config.training.stage == "pt":
            return None
        template = get_template(self.config.data.template) if self.config.data.template else None
        if template is None or template.eos is None:
            return self.tokenizer.eos_token_id
        return self.tokenizer.get_vocab().get(template.eos)

    def _text_encoder(self) -> TextChunks:
        """Documents end with the tokenizer's eos token, and begin with bos if it is a tokenizer that adds one."""
        end = "<|end_of_text|>" if self.llamafactory and self.config.data.template == "llama3" else None
        begins = getattr(self.tokenizer, "add_bos_token", False) and not self.llamafactory
        split_special_tokens = self.config.model.split_special_tokens
        are_tokens = not (self.llamafactory or split_special_tokens)  # what looks like them in the data's text
        return TextChunks(
            Tokeniser(self.tokenizer, eos=end, split_special_tokens=split_special_tokens),
            prefix=[SpecialToken("bos")] if begins else [],
            suffix=[SpecialToken("eos")],
            cutoff_len=self.config.data.cutoff_len,
            begin=(self.tokenizer.bos_token or "") if begins and are_tokens else "",
            end=(self.tokenizer.eos_token or "") if are_tokens else "",
            llamafactory=self.llamafactory,
        )


class _Split(NamedTuple):
    """Rows that are prepared together."""

    name: str
    specs: list[DatasetSpec]
    is_held_out: bool = False
    """The part of the training data that ``data.val_size`` sets aside."""
