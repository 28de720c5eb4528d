"""Paths: from the YAML file's folder, then from the current one; what is missing is named with what is near."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_llm.config import Config, DatasetSource
from tests.llm.config.conftest import MINIMAL

Load = Callable[..., Config]
Error = Callable[..., str]


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder that is not the YAML file's."""
    path = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(path)
    return path


def file_name(config: Config) -> str:
    assert isinstance(config.data.dataset, DatasetSource)
    return config.data.dataset.file_name


def test_input_paths_start_at_the_yaml_file_then_at_the_current_folder(
    load: Load, folder: Path, elsewhere: Path
) -> None:
    (elsewhere / "train.jsonl").touch()
    (elsewhere / "here.jsonl").touch()
    assert file_name(load()) == str(folder / "train.jsonl")
    assert file_name(load("--data.dataset.file_name=here.jsonl")) == str(elsewhere / "here.jsonl")
    assert file_name(load(f"--data.dataset.file_name={elsewhere}/train.jsonl")) == str(elsewhere / "train.jsonl")
    assert load().model.model_name_or_path == str(folder / "model")
    assert load().training.output_dir == "out"  # written, not read


def test_home_is_understood(load: Load, folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))
    (elsewhere / "mine.jsonl").touch()
    assert file_name(load("--data.dataset.file_name=~/mine.jsonl")) == str(elsewhere / "mine.jsonl")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.dataset.file_name=tain.jsonl", "there is no tain.jsonl or {cwd}/tain.jsonl; did you mean train.jsonl?"),
        ("model.model_name_or_path=modell", "there is no modell or {cwd}/modell; did you mean model?"),
        ("model.model_name_or_path=Qwen/Qwen3-8B", "there is no Qwen/Qwen3-8B or"),
        ("model.model_name_or_path=.", "has no config.json"),
        ("model.model_name_or_path=train.jsonl", "train.jsonl is a file; a folder is needed"),
        ("model.tokenizer_name_or_path=tok", "there is no tok or"),
        ("training.resume_from_checkpoint=step-1", "there is no step-1 or"),
        (
            "data.dataset=alpaca",
            "data.dataset_dir: there is no data or {cwd}/data; it explains the names in data.dataset",
        ),
    ],
)
def test_missing_files(override: str, message: str, error: Error, elsewhere: Path) -> None:
    assert message.format(cwd=elsewhere) in error(f"--{override}")


def test_a_missing_file_is_told_with_its_line(error: Error) -> None:
    assert error(yaml=MINIMAL.replace("train.jsonl", "x")).startswith(
        "run.yaml, line 5: data.dataset.file_name: there is"
    )


def test_names_need_a_folder_with_dataset_info(load: Load, error: Error, folder: Path) -> None:
    (folder / "sets").mkdir()
    names = ["--data.dataset=a, b", "--data.dataset_dir=sets"]
    assert "sets has no dataset_info.json" in error(*names)
    (folder / "sets" / "dataset_info.json").write_text("{}")
    config = load(*names)
    assert config.data.dataset == "a, b"
    assert config.data.dataset_dir == str(folder / "sets")


def test_resuming(load: Load, folder: Path) -> None:
    assert load("--training.resume_from_checkpoint=auto").training.resume_from_checkpoint == "auto"
    (folder / "step-00000020").mkdir()
    config = load("--training.resume_from_checkpoint=step-00000020")
    assert config.training.resume_from_checkpoint == str(folder / "step-00000020")


def test_a_blend_of_indexed_files(load: Load, error: Error, folder: Path) -> None:
    for name in ("a", "b"):
        (folder / f"{name}.idx").touch()
    mg = ("--data.data_manager_type=mg", "--training.stage=pt")
    expected = {str(folder / "a"): 0.3, str(folder / "b"): 0.7}
    for written in ("[0.3, a, 0.7, b]", "[3e-1, a, 7e-1, b]", "{a: 0.3, b: 0.7}"):
        config = load(*mg, f"--data.dataset={{file_name: {written}}}")
        assert config.data.dataset.file_name == expected
    assert load(*mg, "--data.dataset={file_name: [a, b]}").data.dataset.file_name == dict.fromkeys(expected)
    assert "there is no" in error(*mg, "--data.dataset={file_name: [0.3, a, 0.7, c]}")
    for wrong in ("[0.3, a, 0.7]", "[0.3, a, 0.7, a]"):
        assert "must be weights and different paths in turn" in error(*mg, f"--data.dataset={{file_name: {wrong}}}")
    assert "must have a weight above 0" in error(*mg, "--data.dataset={file_name: [0, a, 0.7, b]}")
    assert "must have a weight above 0" in error(*mg, "--data.dataset={file_name: {a: 0.5, b: null}}")
    assert "data_manager_type: mg" in error("--data.dataset={file_name: [a, b]}")
