"""Reading YAML and overrides: what is no mapping, where values come from, what overrides reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_llm.config import Config, DatasetSource, load_config, split_overrides
from mindspeed_llm.errors import ConfigError
from tests.llm.config.conftest import MINIMAL

Load = Callable[..., Config]
Error = Callable[..., str]


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("", "run.yaml: expected a mapping with the sections model, data, training, ...; the file is empty"),
        ("- a\n- b\n", "it holds the list ['a', 'b']"),
        ("model:\n\tmodel_name_or_path: x\n", "run.yaml, line 2, column 1: not valid YAML: found character '\\t'"),
        ("model: {a: b\ntraining: 3\n", "run.yaml, line 2, column 9: not valid YAML: expected ',' or '}'"),
        (
            "model: {a: 1}\n---\nmodel: {a: 2}\n",
            "run.yaml, line 2, column 1: not valid YAML: but found another document",
        ),
        ("model: !!python/object:os.system {}\n", "run.yaml, line 1, column 8: not valid YAML: could not determine"),
        ("model: \x07\n", "run.yaml: not valid YAML: unacceptable character #x0007"),
        ("model: &x {a: *x}\n", "not valid YAML: an alias leads into itself"),
        ("training: {? [a] : b}\n", "not valid YAML: found unhashable key"),
    ],
)
def test_what_cannot_be_read_is_one_message_with_its_place(yaml: str, message: str, error: Error) -> None:
    assert message in error(yaml=yaml)


def test_a_tab_comes_with_the_remedy(error: Error) -> None:
    assert error(yaml="model:\n\tx: 1\n").endswith("indent with spaces")


def test_a_missing_file_names_the_one_that_was_meant(folder: Path) -> None:
    (folder / "quickstart.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"quickstat\.yaml: no such file; did you mean .*/quickstart\.yaml\?"):
        load_config(folder / "quickstat.yaml")


def test_other_encodings_are_errors_and_a_byte_order_mark_is_none(folder: Path) -> None:
    path = folder / "run.yaml"
    path.write_bytes(b"# caf\xe9\n" + MINIMAL.encode())
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        load_config(path)
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    load_config(path)


def test_doubled_keys_are_named_with_both_lines(error: Error) -> None:
    assert error(yaml=MINIMAL + "  seed: 1\n  seed: 2\n") == (
        "run.yaml, line 9: training.seed: given twice, first in line 8"
    )
    assert "line 8: data: given twice, first in line 3" in error(yaml=MINIMAL + "data: {}\n")


def test_anchors_and_merge_keys_work(load: Load) -> None:
    yaml = MINIMAL + "  <<: &common {seed: 1, lr: 1e-3}\n  seed: 2\n"
    config = load(yaml=yaml)
    assert (config.training.seed, config.training.lr) == (2, 1e-3)


def test_an_override_changes_one_use_of_an_anchor(load: Load, folder: Path) -> None:
    yaml = MINIMAL.replace("dataset:", "dataset: &rows").replace("training:", "  eval_dataset: *rows\ntraining:")
    config = load("--data.eval_dataset.num_samples=5", yaml=yaml)
    rows = DatasetSource(file_name=str(folder / "train.jsonl"))
    assert config.data.dataset == rows
    assert config.data.eval_dataset == rows.model_copy(update={"num_samples": 5})


def test_overrides_win_over_the_file_and_the_last_over_earlier_ones(load: Load) -> None:
    config = load("--training.seed=1", "--training.lr", "3e-4", "--training.seed=2", yaml=MINIMAL + "  seed: 7\n")
    assert (config.training.seed, config.training.lr) == (2, 3e-4)


def test_override_values_are_yaml(load: Load) -> None:
    config = load(
        "--model.plugins=[os, sys]",
        "--training.save_total_limit=null",
        "--training.max_steps",
        "-1",
        "--training.deterministic=false",
        "--data.default_system='a: b'",
        "--data.template=",
    )
    assert config.model.plugins == ["os", "sys"]
    assert config.training.save_total_limit is None
    assert config.training.max_steps == -1
    assert config.training.deterministic is False
    assert config.data.default_system == "a: b"
    assert config.data.template is None


def test_overrides_reach_into_mappings_and_replace_them(load: Load, folder: Path) -> None:
    (folder / "other.csv").touch()
    config = load("--data.dataset.columns.prompt=question", "--data.eval_dataset.file_name=other.csv")
    assert isinstance(config.data.dataset, DatasetSource)
    assert config.data.dataset.columns == {"prompt": "question"}
    assert config.data.dataset.file_name == str(folder / "train.jsonl")  # its neighbours stay
    assert isinstance(config.data.eval_dataset, DatasetSource)
    assert config.data.eval_dataset.file_name == str(folder / "other.csv")

    replaced = load("--data.dataset={file_name: other.csv}", yaml=MINIMAL + "  seed: 1\n")
    assert replaced.data.dataset == DatasetSource(file_name=str(folder / "other.csv"))


def test_overrides_create_a_section_that_the_file_lacks(load: Load) -> None:
    assert load("--parallel.fsdp_size=2").parallel.fsdp_size == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--training.lr"], "--training.lr: the value is missing; write --training.lr=value"),
        (["--training.lr", "--training.seed=1"], "--training.lr: the value is missing"),
        (["training.lr=1"], "training.lr=1: not an override, which is --section.key=value"),
        (["--lr=1"], "--lr=1: not an override"),
        (["--training..lr=1"], "--training..lr=1: an override is --section.key=value"),
        (["--training.seed={"], "--training.seed={: the value is not YAML"),
        (["--training.lr=abc"], "--training.lr=abc: training.lr: must be a number, got the text 'abc'"),
        (["--trainin.lr=1"], "--trainin.lr=1: trainin: unknown key; did you mean training?"),
        (
            ["--data.dataset=x", "--data.dataset.tags=y"],
            "data.dataset is the text 'x' (--data.dataset=x), it has no keys",
        ),
        (["--training.output_dir.x=y"], "training.output_dir is the text 'out' (line 7), it has no keys"),
    ],
)
def test_a_bad_override_is_shown_as_it_was_typed(overrides: list[str], message: str, error: Error) -> None:
    assert message in error(*overrides)


def test_overrides_are_told_from_other_arguments() -> None:
    arguments = ["--training.lr", "1e-4", "run.yaml", "--nproc", "2", "--data.x=a.b", "--dry-run"]
    assert split_overrides(arguments) == (
        ["run.yaml", "--nproc", "2", "--dry-run"],
        ["--training.lr=1e-4", "--data.x=a.b"],
    )
