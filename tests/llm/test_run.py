"""The command line: what it starts, its exit status, and its one message."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mindspeed_llm import run
from mindspeed_llm.config import Config, load_config
from mindspeed_llm.errors import DataError

Status = Callable[..., int]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``run`` would have started: configurations to train, and launches."""
    calls: list[Any] = []
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mindspeed_llm.trainer", SimpleNamespace(train=calls.append))
    monkeypatch.setattr(run, "launch", lambda arguments, nproc: calls.append((arguments, nproc)) or 7)
    return calls


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    """A configuration in which everything that can be checked without importing torch is right."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").touch()
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {model_name_or_path: .}\ndata: {dataset: {file_name: train.jsonl}}\ntraining: {output_dir: out}\n"
    )
    return str(path)


def test_one_process_trains_here(config_file: str, started: list[Any]) -> None:
    assert run.main([config_file, "--training.lr", "1e-3", "--nproc", "1"]) == 0
    (config,) = started
    assert config.training.lr == 1e-3
    assert config.parallel.fsdp_size is None  # derived by the trainer, for the ranks that there are


def test_under_torchrun_it_joins_the_job(
    config_file: str, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert run.main([config_file, "--parallel.fsdp_size=4"]) == 0
    assert len(started) == 1
    assert run.main([config_file, "--parallel.fsdp_size=3"]) == 2
    assert "3 does not divide the number of ranks, 8 / 3" in capsys.readouterr().err
    assert len(started) == 1


def test_nproc_launches_the_same_command_line(config_file: str, started: list[Any]) -> None:
    status = run.main(["--nproc=4", "--training.lr", "1e-3", config_file, "--data.max_samples=5"])
    assert status == 7  # what launch returned
    arguments = ["-m", "mindspeed_llm.run", config_file, "--training.lr=1e-3", "--data.max_samples=5"]
    assert started == [(arguments, 4)]


def test_print_config_prints_what_load_config_reads(
    config_file: str, started: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run.main([config_file, "--print-config", "--training.seed=5", "--parallel.fsdp_size=64"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["training"]["seed"] == 5
    (tmp_path / "printed.yaml").write_text(printed)
    assert load_config(tmp_path / "printed.yaml") == load_config(
        config_file, ["--training.seed=5", "--parallel.fsdp_size=64"]
    )
    assert started == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.learning_rat=1"], "training.learning_rat: unknown key; did you mean training.lr?"),
        (
            ["--lr=1"],
            "error: --lr=1: keys are given as --section.key=value; lr: unknown key; it belongs to training.lr",
        ),
        (["--training.lr"], "error: --training.lr: the value is missing"),
        (
            ["--nproc=3", "--parallel.fsdp_size=2"],
            "run.yaml: parallel.fsdp_size: 2 does not divide the number of ranks",
        ),
        (["--dry-run", "--world-size=3", "--parallel.fsdp_size=2"], "2 does not divide the number of ranks, 3 / 2"),
    ],
)
def test_what_the_user_can_mend_is_status_2_and_one_message(
    arguments: list[str], message: str, config_file: str, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([config_file, *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert out == ""
    assert started == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: CONFIG.yaml"),
        (["run.yaml", "--nproc=0"], "argument --nproc: 0 is not a whole number above 0"),
        (["run.yaml", "--world-size=2"], "--world-size goes with --dry-run"),
    ],
)
def test_a_wrong_command_line_is_status_2_with_the_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run.main(arguments)
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert "usage: python -m mindspeed_llm.run CONFIG.yaml" in err


def test_nproc_inside_torchrun_is_refused(
    config_file: str, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert run.main([config_file, "--nproc=2"]) == 2
    assert "torchrun (RANK is set) has started this one" in capsys.readouterr().err


def test_errors_of_the_run(
    config_file: str, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_with(error: Exception) -> None:
        def train(config: Config) -> None:
            raise error

        monkeypatch.setitem(sys.modules, "mindspeed_llm.trainer", SimpleNamespace(train=train))

    fail_with(DataError("train.jsonl:7: not JSON"))
    assert run.main([config_file]) == 2
    assert capsys.readouterr().err == "error: train.jsonl:7: not JSON\n"

    fail_with(RuntimeError("a bug"))
    assert run.main([config_file]) == 1
    err = capsys.readouterr().err
    assert err.count("Traceback") == err.count("RuntimeError: a bug") == 1


def test_ctrl_c_before_the_first_step_is_one_line(
    config_file: str, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: Config) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "mindspeed_llm.trainer", SimpleNamespace(train=train))
    assert run.main([config_file]) == 1
    assert capsys.readouterr().err == "stopped by Ctrl-C while not training: there was no step to finish\n"


def test_a_wrong_configuration_is_told_before_anything_slow_is_imported(config_file: str) -> None:
    code = (
        "import sys; from mindspeed_llm.run import main; status = main(sys.argv[1:]);"
        "sys.exit(f'imported {slow}' if (slow := {'torch', 'transformers', 'datasets'} & set(sys.modules)) else status)"
    )
    command = [sys.executable, "-c", code, config_file, "--training.sed=1", "--nproc=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {config_file}: --training.sed=1: training.sed: unknown key; did you mean training.seed?\n"
    )
