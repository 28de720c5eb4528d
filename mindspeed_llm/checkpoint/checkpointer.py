"""Checkpoints of a running training: written whole or not at all, read on any number of ranks.

``checkpoints/step-00000020/`` holds the sharded model and optimizer (torch.distributed.checkpoint), ``state.json`` with
the position of trainer and loader, one ``rng-00000.pt`` per rank, and, written last, the file ``COMPLETE``. A folder
without it is what a crash left behind: it is never read and is replaced when its step comes again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from mindspeed_llm.checkpoint.durable import fsync
from mindspeed_llm.checkpoint.optimizer_state import empty_optimizer_state, optimizer_tensors, put_optimizer_state
from mindspeed_llm.errors import DataError, UserError
from mindspeed_llm.foundation.random_state import get_random_state, set_random_state
from mindspeed_llm.logging import logger
from mindspeed_llm.models.skeleton import named_state

_COMPLETE = "COMPLETE"


class Stateful(Protocol):
    """A small object whose state is plain JSON. ``state_dict`` may be collective; the first rank's is kept."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainingState:
    """All that a run must know to go on as if it had never stopped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    positions: Mapping[str, Stateful]
    """Trainer, loader, ...: by name."""


class Checkpointer:
    """Saves and loads the checkpoints of one output folder. Every method is collective."""

    def __init__(self, output_dir: Path, save_total_limit: int | None = None, *, model_only: bool = False) -> None:
        self.folder = output_dir / "checkpoints"
        self.save_total_limit = save_total_limit
        self.model_only = model_only
        self._own: set[Path] = set()  # written or read by this run; others of the same step are replaced

    def save(self, step: int, state: TrainingState) -> None:
        """Write the checkpoint of ``step``, then delete the oldest ones beyond the limit."""
        path = self.folder / f"step-{step:08d}"
        if path in self._own and is_complete(path):
            return
        self._own.add(path)
        if dist.get_rank() == 0:
            _remove(path)
            path.mkdir(parents=True)
        dist.barrier()
        tensors = _model_tensors(state.model)
        if not self.model_only:
            tensors |= optimizer_tensors(state.model, state.optimizer)
        dcp.save(tensors, checkpoint_id=path)
        torch.save(get_random_state(), path / f"rng-{dist.get_rank():05d}.pt")
        positions = {name: part.state_dict() for name, part in state.positions.items()}
        dist.barrier()  # every rank's files are there
        if dist.get_rank() == 0:
            content = {"step": step, "world_size": dist.get_world_size(), "positions": positions}
            (path / "state.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
            _publish(path)
            fsync(self.folder)
            self._prune()
        dist.barrier()
        logger.info("saved %s", path)

    def load(self, path: Path, state: TrainingState) -> None:
        """Put the checkpoint ``path`` into model, optimizer, positions and random generators, all in place.

        The number of ranks may differ from the one that saved: tensors are cut anew, but random generators then start
        from the seed. Raises UserError when the checkpoint is missing, incomplete, of the model only or damaged.
        """
        _check_resumable(path)
        self._own.add(path)
        reader = dcp.FileSystemReader(path)
        tensors = _model_tensors(state.model)
        with _damage_explained(path):
            stored = reader.read_metadata().state_dict_metadata
            content = json.loads((path / "state.json").read_text(encoding="utf-8"))
            same_ranks = content["world_size"] == dist.get_world_size()
            random_state = torch.load(path / f"rng-{dist.get_rank():05d}.pt") if same_ranks else None
        optimizer_state = empty_optimizer_state(state.model, stored)
        if not optimizer_state:
            raise UserError(f"{path} holds the model only (training.save_only_model): a run can't go on from it")
        _check_same_model(path, tensors, stored)
        try:
            dcp.load(tensors | optimizer_state, storage_reader=reader)
        except CheckpointException as error:
            failures = [failure for failure, _ in error.failures.values()]
            causes = "; ".join(sorted({str(failure) or repr(failure) for failure in failures}))
            if all(map(_means_damage, failures)):
                raise DataError(f"{path} is damaged: {causes}{_remedy(path)}") from error
            raise DataError(f"{path} can't be read: {causes}") from error
        put_optimizer_state(state.model, state.optimizer, optimizer_state)
        for name, part in state.positions.items():
            part.load_state_dict(content["positions"][name])
        if random_state is not None:
            set_random_state(random_state)
        else:
            logger.warning(
                "%s was written by %d ranks, this job has %d: random generators start from the seed",
                path, content["world_size"], dist.get_world_size(),
            )  # fmt: skip

    def starting_point(self, wanted: str | None) -> Path | None:
        """The checkpoint that ``training.resume_from_checkpoint`` means: ``auto`` the newest complete one, if any.

        Raises UserError when it can't be gone on from, and when a new run's checkpoints would mix with another one's.
        """
        path = self.latest() if wanted == "auto" else wanted
        if path is not None:
            _check_resumable(Path(path))
            return Path(path)
        if any(map(is_complete, self._paths())):
            raise UserError(
                f"{self.folder} holds the checkpoints of an earlier run: go on from them with "
                "training.resume_from_checkpoint=auto, or choose another training.output_dir, or delete them"
            )
        return None

    def latest(self) -> Path | None:
        """The newest complete checkpoint of the folder, None without any."""
        paths = self._paths()
        for path in paths:
            if is_complete(path):
                return path
            logger.warning("%s is incomplete (its run was interrupted while saving) and left aside", path)
        return None

    def _paths(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("step-*"), reverse=True)

    def _prune(self) -> None:
        """Runs after the new checkpoint is durable, so the newest complete one always stays."""
        if self.save_total_limit is not None:
            for path in [path for path in self._paths() if is_complete(path)][self.save_total_limit :]:
                _remove(path)


def is_complete(path: Path) -> bool:
    """Was this checkpoint written to its end?"""
    return (path / _COMPLETE).is_file()


def _remove(path: Path) -> None:
    """Delete a checkpoint; a crash in between leaves nothing that looks whole."""
    (path / _COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _publish(path: Path) -> None:
    """Make everything in ``path`` durable, then mark it complete."""
    for file in path.iterdir():
        fsync(file)
    (path / _COMPLETE).touch()
    fsync(path / _COMPLETE)
    fsync(path)


def _check_resumable(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"training.resume_from_checkpoint: {path} is not a folder")
    if not is_complete(path):
        raise UserError(
            f"training.resume_from_checkpoint: {path} has no file {_COMPLETE}: it is no checkpoint, "
            "or its run was interrupted while saving"
        )


@contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    """The ways in which json, pickle and torch say that a file is missing or cut short."""
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, UnpicklingError) as error:
        raise DataError(f"{path} is damaged: {error!r}{_remedy(path)}") from error


def _means_damage(error: BaseException) -> bool:
    """Does this failure of reading tensors lie in the files, rather than in memory or permissions?"""
    return not isinstance(error, (MemoryError, torch.OutOfMemoryError, PermissionError))


def _remedy(damaged: Path) -> str:
    """The user chooses to lose the steps since the older checkpoint; a run does not fall back by itself."""
    older = [path for path in damaged.parent.glob("step-*") if path.name < damaged.name and is_complete(path)]
    if not older:
        return "; there is no older complete checkpoint beside it"
    return f"; to go on from the one before, set training.resume_from_checkpoint: {max(older)}"


def _check_same_model(path: Path, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, STORAGE_TYPES]) -> None:
    """Every tensor of the model is there, in its shape, and none beside them."""
    for name in sorted(tensors.keys() | {name for name in stored if name.startswith("model.")}):
        tensor, metadata = tensors.get(name), stored.get(name)
        if not isinstance(metadata, TensorStorageMetadata):
            difference = "is missing in it"
        elif tensor is None:
            difference = "is in it, but not in this model"
        elif metadata.size != tensor.shape:
            difference = f"has the shape {list(metadata.size)} in it, {list(tensor.shape)} in this model"
        else:
            continue
        raise DataError(
            f"{path} is a checkpoint of another model: {name.removeprefix('model.')} {difference}; set "
            "model.model_name_or_path to the model of that run, or choose another training.output_dir"
        )


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under ``model.``; a shared parameter once, under its first name."""
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_state(model).items():
        tensors.setdefault(id(tensor), (f"model.{name}", tensor.detach()))
    return dict(tensors.values())
