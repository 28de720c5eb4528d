"""From keys to data sets: ``data_manager_type``, ``split``, the length of the run, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.config import Config, load_config
from mindspeed_llm.data.factory import Data, DataFactory
from mindspeed_llm.data.loader import RowDataset
from mindspeed_llm.data.megatron.gpt_dataset import GptDataset
from mindspeed_llm.errors import ConfigError, DataError, UserError
from tests.llm.data.megatron.writing import write_indexed

from ..conftest import ORACLES, Prepare, make_config

CORPUS = ORACLES / "megatron" / "corpus_a"


@pytest.fixture
def build(tmp_path: Path, shared_tokenizer: PreTrainedTokenizerBase):
    """``build(prefix, parity=..., other keys of any section)``: the data of a pretraining run over it."""

    def run(prefix: Path = CORPUS, *, parallel: dict[str, int] | None = None, **keys: Any) -> Data:
        training = {"stage": "pt", "seed": 1234, "num_train_epochs": 1.0}
        data = {"dataset": {"file_name": str(prefix)}, "data_manager_type": "mg", "cutoff_len": 64}
        for key, value in keys.items():
            (training if key in Config.model_fields["training"].annotation.model_fields else data)[key] = value
        config = make_config(tmp_path / "out", data, training)
        mesh = config.parallel.model_copy(update=parallel or {})
        return DataFactory(config.model_copy(update={"parallel": mesh}), shared_tokenizer).create()

    return run


def indexed(rows: RowDataset) -> GptDataset:
    assert isinstance(rows, GptDataset)
    return rows


def test_all_documents_are_trained_on_unless_they_are_split(build) -> None:
    data = build()
    assert data.eval == {}
    assert (data.shuffled, data.epochs) == (True, 1)
    assert "data train: 120 rows read" in data.report
    data = build(split="900,80,20")
    assert (len(data.train), len(data.eval["eval"])) == (125, 8)
    assert not set(indexed(data.train).order.document_index) & set(indexed(data.eval["eval"]).order.document_index)
    assert len(build(max_samples=10).train) < 20  # the first ten documents


@pytest.mark.parametrize(
    ("training", "parallel", "epochs"),
    [
        ({"num_train_epochs": 3.0}, {}, 3),
        ({"num_train_epochs": 1.5}, {}, 2),
        ({"num_train_epochs": 0.1}, {}, 1),
        ({"max_steps": 62}, {}, 1),  # 124 of the 125 rows of an epoch
        ({"max_steps": 63}, {}, 2),
        ({"max_steps": 62}, {"dp_replicate_size": 2, "fsdp_size": 3}, 6),
        ({"max_steps": 62, "gradient_accumulation_steps": 4}, {}, 4),
    ],
)
def test_as_many_epochs_as_the_run_is_long(training: dict, parallel: dict, epochs: int, build) -> None:
    data = build(split="900,80,20", per_device_train_batch_size=2, parallel=parallel, **training)
    assert data.epochs == epochs
    assert len(data.train) == epochs * 125
    assert len(data.eval["eval"]) == 8


def test_without_shuffling_rows_come_as_in_the_file(build) -> None:
    order = indexed(build(disable_shuffling=True).train).order
    assert order.document_index.tolist() == list(range(120))
    assert order.shuffle_index.tolist() == list(range(len(order.shuffle_index)))


def test_documents_leak_only_where_megatron_s_numbers_are_asked_for(build) -> None:
    assert indexed(build(parity="megatron").train).form
    assert not indexed(build().train).form


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split": "0,1,1"}, "data.split: 0,1,1 leaves no documents with tokens to train, of 120 in corpus_a"),
        ({"split": "969,1,30"}, "data.split: 969,1,30 leaves no documents with tokens to eval, of 120 in corpus_a"),
        ({"cutoff_len": 9000}, r"too few for one sample of data.cutoff_len \+ 1 = 9001 tokens"),
        ({"split": "9,a"}, "data.split: '9,a' is not up to three proportions"),
        ({"split": "0,0,0"}, "not up to three proportions"),
        ({"split": "1,-1,5"}, "not up to three proportions"),
        ({"split": "1,nan"}, "not up to three proportions"),
        ({"split": "1,1,1,1"}, "not up to three proportions"),
        ({"val_size": 0.1}, "data.val_size: not for .bin/.idx files; data.split cuts them"),
        ({"eval_dataset": {"file_name": "x"}}, "data.eval_dataset: not for"),
        ({"dataset": {"file_name": str(CORPUS), "num_samples": 3}}, "data.dataset.num_samples: not for"),
    ],
)
def test_what_cannot_be(keys: dict[str, Any], message: str, build) -> None:
    with pytest.raises(UserError, match=message):
        build(**keys)


@pytest.mark.parametrize("keys", [{"max_steps": 3}, {"num_train_epochs": 2.0}])
def test_a_corpus_without_tokens_is_an_error_and_no_endless_loop(keys: dict, build, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves no documents with tokens to train"):
        build(write_indexed(tmp_path / "empty", [[], []]), **keys)


def test_text_is_tokenised_where_there_are_no_indexed_files(prepare: Prepare) -> None:
    text = {"file_name": str(ORACLES / "data" / "text.jsonl")}
    data = prepare(text, stage="pt", data_manager_type="mg", cutoff_len=64)
    assert (
        data.train[0]["input_ids"].tolist() == prepare(text, stage="pt", cutoff_len=64).train[0]["input_ids"].tolist()
    )
    assert not data.shuffled
    with pytest.raises(
        ConfigError, match=r"data.split: '9,1' cuts only .bin and .idx files, and there is no .*text\.jsonl\.idx"
    ):
        prepare(text, stage="pt", data_manager_type="mg", split="9,1")
    with pytest.raises(ConfigError, match=r"training.parity: megatron needs the .bin and .idx files"):
        prepare(text, stage="pt", data_manager_type="mg", parity="megatron")


def load(folder: Path, data: str, stage: str = "pt") -> Config:
    (folder / "run.yaml").write_text(
        f"model: {{model_name_or_path: {ORACLES}/models/tiny-qwen3}}\n"
        f"data: {{data_manager_type: mg, {data}}}\ntraining: {{output_dir: out, stage: {stage}}}\n"
    )
    return load_config(folder / "run.yaml")


def test_a_configuration_names_the_files_by_their_prefix(tmp_path: Path) -> None:
    write_indexed(tmp_path / "corpus", [[1, 2]])
    config = load(tmp_path, "dataset: {file_name: corpus}, split: '969,30,1'")
    assert config.data.dataset.file_name == str(tmp_path / "corpus")  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"there is no .*corpu or"):
        load(tmp_path, "dataset: {file_name: corpu}")
    with pytest.raises(ConfigError, match="data_manager_type: mg; set stage: pt"):
        load(tmp_path, "dataset: {file_name: corpus}", stage="sft")
    with pytest.raises(ConfigError, match=r"data.split: cuts the files of data_manager_type: mg; use val_size"):
        load(tmp_path, "dataset: {file_name: run.yaml}, data_manager_type: lf, split: '9,1'")
