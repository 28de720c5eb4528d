"""Checkpoints: whole or not at all, exact, and on any number of ranks."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_llm.checkpoint.checkpointer import Checkpointer, TrainingState, is_complete
from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.errors import DataError, UserError
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.distributed import REPOSITORY, launch
from tests.llm.checkpoint.common import Position, one_step, train, training_state
from tests.llm.parallel.cases import build_model


@pytest.fixture(autouse=True)
def process_group():
    with start() as distributed:
        yield distributed


def test_a_loaded_run_goes_on_bit_for_bit(tmp_path):
    saved = training_state(steps=3)
    saved.positions["place"].value = 5
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, saved)
    draws = random.random(), np.random.rand(), torch.rand(3).tolist()
    train(saved, 3)

    loaded = training_state(seed=1, steps=1)  # other weights and moments: all must be replaced
    assert checkpointer.latest() == tmp_path / "checkpoints" / "step-00000003"
    checkpointer.load(checkpointer.latest(), loaded)
    assert loaded.positions["place"].value == 5
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == draws
    assert loaded.model.unused.weight not in loaded.optimizer.state
    train(loaded, 3)
    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name


def test_saving_does_not_disturb_the_run(tmp_path):
    plain, saving = training_state(steps=2), training_state(steps=2)
    Checkpointer(tmp_path).save(2, saving)
    for state in (plain, saving):
        train(state, 2)
    assert torch.equal(plain.model.used.weight, saving.model.used.weight)


def test_an_interrupted_save_is_left_aside_and_later_replaced(tmp_path, monkeypatch, caplog):
    checkpointer, state = Checkpointer(tmp_path), training_state(steps=1)
    checkpointer.save(1, state)
    with monkeypatch.context() as patched:
        patched.setattr(dcp, "save", lambda *_, checkpoint_id, **__: (checkpoint_id / "__0_0.distcp").touch() or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            checkpointer.save(2, state)
    broken = tmp_path / "checkpoints" / "step-00000002"
    assert broken.is_dir()
    assert checkpointer.latest().name == "step-00000001"
    with pytest.raises(UserError, match="step-00000002 has no file COMPLETE"):
        checkpointer.load(broken, state)
    checkpointer.save(2, state)
    assert checkpointer.latest() == broken
    checkpointer.load(broken, state)


def test_the_limit_deletes_the_oldest_complete_ones(tmp_path):
    checkpointer, state = Checkpointer(tmp_path, save_total_limit=2), training_state(steps=1)
    for step in (1, 2, 3, 10):
        checkpointer.save(step, state)
    assert sorted(p.name for p in checkpointer.folder.iterdir()) == ["step-00000003", "step-00000010"]


def test_no_checkpoint_and_no_folder(tmp_path):
    assert Checkpointer(tmp_path / "never").latest() is None
    with pytest.raises(UserError, match="is not a folder"):
        Checkpointer(tmp_path).load(tmp_path / "never", training_state())


def test_a_damaged_shard_is_named(tmp_path):
    checkpointer, state = Checkpointer(tmp_path), training_state(steps=1)
    checkpointer.save(1, state)
    (shard,) = checkpointer.latest().glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(DataError, match=r"step-00000001 is damaged: .*; there is no older complete checkpoint"):
        checkpointer.load(checkpointer.latest(), state)


@pytest.mark.parametrize("kept", [None, 0, 0.5])
@pytest.mark.parametrize("pattern", ["*.distcp", "state.json"])
def test_the_newest_older_complete_checkpoint_is_offered(pattern, kept, tmp_path):
    checkpointer, state = Checkpointer(tmp_path), training_state(steps=1)
    for step in (1, 2, 3, 4, 5):
        checkpointer.save(step, state)
    (checkpointer.folder / "step-00000003" / "COMPLETE").unlink()
    damaged = checkpointer.folder / "step-00000004"
    (file,) = damaged.glob(pattern)
    content = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError) as raised:
        checkpointer.load(damaged, state)
    assert f"{damaged} is damaged: " in str(raised.value)
    assert str(raised.value).endswith(f"training.resume_from_checkpoint: {checkpointer.folder / 'step-00000002'}")


def test_want_of_memory_is_no_damage(tmp_path, monkeypatch):
    checkpointer, state = Checkpointer(tmp_path), training_state(steps=1)
    checkpointer.save(1, state)

    def out_of_memory(*_):
        raise MemoryError

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", out_of_memory)
    with pytest.raises(DataError, match=r"step-00000001 can't be read: MemoryError\(\)$"):
        checkpointer.load(checkpointer.latest(), state)


@pytest.mark.parametrize("name", [".metadata", "state.json", "rng-00000.pt"])
@pytest.mark.parametrize("kept", [None, 0, 30])
def test_a_small_file_that_is_missing_or_cut_is_told(name, kept, tmp_path):
    checkpointer, state = Checkpointer(tmp_path), training_state(steps=1)
    checkpointer.save(1, state)
    file = checkpointer.latest() / name
    content = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(content[:kept])
    before = {key: tensor.clone() for key, tensor in state.model.state_dict().items()}
    train(state, 1)
    with pytest.raises(DataError, match="step-00000001 is damaged"):
        checkpointer.load(checkpointer.latest(), state)
    assert not torch.equal(state.model.state_dict()["used.weight"], before["used.weight"])  # nothing was loaded


def test_whenever_a_run_is_killed_the_newest_complete_checkpoint_is_whole(tmp_path):
    """A child saves as fast as it can and keeps one checkpoint. It is stopped at many moments, and what its folder then
    holds, which is what a kill would leave, must be enough to go on from."""
    folder = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-m", "tests.llm.checkpoint.endless_worker", str(folder)], cwd=REPOSITORY)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "checkpoints" / "step-00000003").exists():
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for moment in range(20):
            time.sleep(0.003 + 0.001 * moment)
            child.send_signal(signal.SIGSTOP)
            shutil.copytree(folder, tmp_path / str(moment))
            child.send_signal(signal.SIGCONT)
    finally:
        child.kill()
        child.wait()
    incomplete, steps = 0, set()
    for moment in range(20):
        checkpointer, state = Checkpointer(tmp_path / str(moment)), training_state(seed=1)
        newest = checkpointer.latest()
        assert newest is not None
        incomplete += any(not is_complete(path) for path in checkpointer.folder.iterdir())
        checkpointer.load(newest, state)
        steps.add(state.positions["place"].value)
        assert newest.name == f"step-{state.positions['place'].value:08d}"
        expected = training_state(steps=state.positions["place"].value)
        assert torch.equal(state.model.used.weight, expected.model.used.weight)
    assert incomplete  # the moments did fall into saves,
    assert len(steps) > 1  # and into several of them


@pytest.mark.parametrize(
    ("name", "module", "difference"),
    [
        ("used", nn.Linear(4, 2), r"used.weight has the shape \[2, 3\] in it, \[2, 4\] in this model"),
        ("added", nn.Linear(1, 1), "added.bias is missing in it"),
        ("used", nn.Identity(), "used.bias is in it, but not in this model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(name, module, difference, tmp_path):
    checkpointer, state = Checkpointer(tmp_path), training_state(steps=1)
    checkpointer.save(1, state)
    setattr(state.model, name, module)
    with pytest.raises(DataError, match=f"step-00000001 is a checkpoint of another model: {difference}"):
        checkpointer.load(checkpointer.latest(), state)


def test_model_only_is_small_and_cannot_be_resumed(tmp_path):
    checkpointer, state = Checkpointer(tmp_path, model_only=True), training_state(steps=1)
    checkpointer.save(1, state)
    stored = dcp.FileSystemReader(checkpointer.latest()).read_metadata().state_dict_metadata
    assert all(key.startswith("model.") for key in stored)
    with pytest.raises(UserError, match="save_only_model"):
        checkpointer.load(checkpointer.latest(), state)


def test_two_ranks_save_and_one_goes_on(tmp_path, process_group):
    """Peers' reports E6 and E15: tied weights, a vocabulary of 65."""
    finished = launch([str(Path(__file__).with_name("worker.py")), str(tmp_path)], 2)
    assert finished.returncode == 0, finished.stderr
    parallel = ParallelConfig(param_dtype="fp32")
    model = build_model("tied_llama")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    parallelize(model, build_meshes(parallel, 1, process_group.device), parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    state = TrainingState(model, optimizer, {"place": Position()})
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load(checkpointer.latest(), state)
    assert state.positions["place"].value == 1
    assert isinstance(optimizer.state[model.lm_head.weight]["exp_avg"], DTensor)
    one_step(model, optimizer)
    after = torch.load(tmp_path / "after.pt")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), after[name], rtol=1e-5, atol=1e-6)
