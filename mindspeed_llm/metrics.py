"""What a run reports: ``metrics.jsonl``, TensorBoard, the loss curve and the progress lines. Rank 0 only."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from mindspeed_llm.logging import logger


class Metrics:
    """Writes one record per optimizer step; use it as a context manager.

    ``first_step`` is the number of steps already done: on resume the records of later steps, left by an interrupted
    run, are dropped so that no step appears twice.
    """

    def __init__(self, output_dir: Path, *, first_step: int, total_steps: int, logging_steps: int) -> None:
        self.path = output_dir / "metrics.jsonl"
        self.records = [r for r in read_metrics(self.path) if r["step"] <= first_step]
        self.total_steps = total_steps
        self.logging_steps = logging_steps
        self._output_dir = output_dir
        self._board = SummaryWriter(str(output_dir / "tensorboard"), purge_step=first_step + 1)
        kept = self.path.with_suffix(".tmp")
        kept.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")
        kept.replace(self.path)  # a crash leaves the old file or the new one
        self._file = self.path.open("a", encoding="utf-8")
        self._progress = _progress_bar() if sys.stdout.isatty() else None
        if self._progress is not None:
            self._bar = self._progress.add_task("training", total=total_steps, completed=first_step, loss="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._file.close()
        self._board.close()
        if self.records:
            plot_loss(self.records, self._output_dir / "loss.png")

    def log(self, record: dict) -> None:
        """Add the record of one step (step, epoch, loss, grad_norm, lr, tokens, ...), flushed at once."""
        # JSON has no NaN: a value that is not finite is null, never 0.
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                self._board.add_scalar(name, value, record["step"])
        if self._progress is not None:
            self._progress.update(self._bar, completed=record["step"], loss=f"loss {_number(record['loss'])}")
        elif record["step"] % self.logging_steps == 0 or record["step"] == self.total_steps:
            logger.info(describe(record, self.total_steps))


def describe(record: dict, total_steps: int) -> str:
    """One line for people: the step, its losses and its speed, and the time that is left."""
    seconds_left = round((total_steps - record["step"]) * record["step_time"])
    parts = [
        f"step {record['step']}/{total_steps}",
        *(f"{name} {_number(value)}" for name, value in record.items() if name.endswith("loss") or "eval_loss" in name),
        f"grad norm {_number(record['grad_norm'])}",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
        f"ETA {seconds_left // 3600:d}:{seconds_left // 60 % 60:02d}:{seconds_left % 60:02d}",
    ]
    return "  ".join(parts)


def read_metrics(path: Path) -> list[dict]:
    """The records of a ``metrics.jsonl``; a last line that a crash cut short is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def plot_loss(records: list[dict], path: Path) -> None:
    """Draw training and evaluation loss over the steps as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported late: it takes a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="tight")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    evaluations = sorted({name for record in records for name in record if name.startswith("eval_loss")})
    for name, style in (("loss", "-"), *((name, "o-") for name in evaluations)):
        points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name, markersize=3)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )


class NoMetrics:
    """What ranks other than 0 report: nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def log(self, record: dict) -> None: ...
