"""The command line with the real trainer: an error that ranks find, a signal in mid-training, a dry run."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_llm.config import load_config
from mindspeed_llm.dry_run import dry_run
from tests.distributed import REPOSITORY, run

QUICKSTART = REPOSITORY / "examples" / "quickstart.yaml"
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The quickstart with a model of a few thousand parameters."""
    quickstart = load_config(QUICKSTART)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(quickstart.model.model_name_or_path).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= TINY | {"num_key_value_heads": 2, "layer_types": ["full_attention"] * 2}
    (folder / "config.json").write_text(json.dumps(config))
    path = tmp_path / "run.yaml"
    path.write_text(quickstart.dump_yaml())
    return path


def command(config_file: Path, *overrides: str) -> list[str]:
    folder = config_file.parent
    arguments = [f"--model.model_name_or_path={folder / 'model'}", f"--training.output_dir={folder / 'out'}"]
    return [sys.executable, "-m", "mindspeed_llm.run", str(config_file), *arguments, *overrides]


def test_what_every_rank_finds_wrong_is_told_once(config_file: Path) -> None:
    rows = config_file.parent / "rows.jsonl"
    rows.write_text('{"text": 1}\n')
    done = run(command(config_file, "--nproc=2", f"--data.dataset.file_name={rows}"))
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert f"{rows}:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_run_on_the_same_output_folder_ends_at_once(config_file: Path) -> None:
    out = config_file.parent / "out"
    out.mkdir()
    with (out / ".lock").open("w") as lock:
        lock.write("process 123 on elsewhere\n")
        lock.flush()
        fcntl.lockf(lock, fcntl.LOCK_EX)
        done = run(command(config_file, "--nproc=2"))
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("error: ") == 1
        assert f"another run, process 123 on elsewhere, still writes into {out}" in done.stderr
        assert [path.name for path in out.iterdir()] == [".lock"]  # nothing of the other run was touched
        assert run(command(config_file, "--dry-run")).returncode == 0


def test_a_signal_ends_the_run_after_a_checkpoint(config_file: Path) -> None:
    out = config_file.parent / "out"
    arguments = command(config_file, "--nproc=2", "--training.max_steps=100000", "--training.eval_steps=100000")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not steps(out):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, stderr
    last = steps(out)[-1]
    assert (out / "checkpoints" / f"step-{last:08d}" / "COMPLETE").exists()
    assert not (out / "hf").exists()  # the run is not over


def steps(out: Path) -> list[int]:
    metrics = out / "metrics.jsonl"
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


def test_a_dry_run_tells_what_a_run_of_many_ranks_would_be(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [argument for argument in command(config_file) if argument.startswith("--")]
    config = load_config(config_file, [*overrides, "--parallel.dp_replicate_size=2", "--training.max_steps=50"])
    dry_run(config, 8)
    out = capsys.readouterr().out
    assert "trained on what is in [[ ]]" in out
    # embeddings (tied), two layers of attention, q and k norms, MLP and two norms, and the last norm
    parameters = 1024 * 32 + 2 * (4 * 32 * 32 + 2 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    assert f"model Qwen3ForCausalLM: {parameters:,} parameters" in out
    assert "ranks: dp_replicate_size 2 × fsdp_size 4" in out
    assert f"memory of a rank: weights {parameters / 4 * 4 / 2**30:.3g} + gradients" in out
    assert "a step: 16 rows × 1 micro-batches × 8 ranks = 128 rows" in out
    rows = len(Path(str(config.data.dataset.file_name)).read_text().splitlines())  # type: ignore[union-attr]
    assert f"steps: {-(-rows // 128)} per epoch of {rows} rows, 50 in all" in out
