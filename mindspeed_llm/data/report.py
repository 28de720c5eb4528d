"""What happened to the data on its way to the model: counts, and reasons with examples."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

_EXAMPLES = 5


class Problem(NamedTuple):
    """A row that was skipped, and why."""

    where: str
    reason: str


@dataclass
class Tally:
    """What happened to a number of rows."""

    problems: list[Problem] = field(default_factory=list)
    """Rows that could not be used."""
    truncated: int = 0
    """Rows that lost tokens to ``cutoff_len``."""
    overlong: int = 0
    """Rows left out because they are longer than ``cutoff_len`` (``drop_overlong``)."""
    unlabelled: int = 0
    """Rows left out because nothing in them would be trained on, mostly because their answer was cut off."""
    split: int = 0
    """Conversations that became several rows because the chat template rewrites earlier answers."""


@dataclass
class Report:
    """Counts of one prepared data set. ``str(report)`` is a few lines for the log."""

    name: str
    rows_read: int
    unused_columns: list[str] = field(default_factory=list)
    """Columns in the files that no role was given to."""
    skipped: int = 0
    examples: list[Problem] = field(default_factory=list)
    """The first skipped rows."""
    reasons: dict[str, int] = field(default_factory=dict)
    """How often each reason was met, for the first hundred different ones."""
    truncated: int = 0
    overlong: int = 0
    unlabelled: int = 0
    split: int = 0
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    targets: int = 0
    """Labels that count in the loss: those that are left after the shift."""

    def add(self, tally: Tally) -> None:
        self.truncated += tally.truncated
        self.overlong += tally.overlong
        self.unlabelled += tally.unlabelled
        self.split += tally.split
        self.skipped += len(tally.problems)
        self.examples += tally.problems[: _EXAMPLES - len(self.examples)]
        for problem in tally.problems:
            if problem.reason in self.reasons or len(self.reasons) < 100:
                self.reasons[problem.reason] = self.reasons.get(problem.reason, 0) + 1

    def problems(self) -> str:
        """The commonest reasons and the first examples, as lines of text."""
        lines = [f"  {count} x {reason}" for reason, count in Counter(self.reasons).most_common(_EXAMPLES)]
        lines += [f"  {where}: {reason}" for where, reason in self.examples]
        return "\n".join(lines)

    def __str__(self) -> str:
        lengths = f"{self.tokens / self.rows:.0f} tokens per row" if self.rows else "empty"
        packed = f" of {self.documents} documents" if self.documents != self.rows else ""
        lines = [
            f"data {self.name}: {self.rows_read} rows read -> {self.rows} rows{packed}, {self.tokens} tokens, "
            f"{self.targets} trained on ({lengths})"
        ]
        lines += [f"data {self.name}: {line}" for line in self._losses()]
        if self.skipped:
            lines.append(self.problems())
        if self.unused_columns:
            lines.append(f"data {self.name}: columns not used: {', '.join(self.unused_columns)}")
        return "\n".join(lines)

    def why_empty(self) -> str:
        """What became of the rows, when none is left."""
        if not self.rows_read:
            return "  the files of the data set are empty"
        return "\n".join([f"  {line}" for line in self._losses()] + [self.problems()])

    def _losses(self) -> list[str]:
        counts = (
            (self.skipped, "rows skipped because they cannot be used"),
            (self.truncated, "rows cut off at cutoff_len"),
            (self.overlong, "rows left out because they are longer than cutoff_len"),
            (self.unlabelled, "rows left out because nothing in them would be trained on (is cutoff_len too small?)"),
            (self.split, "conversations split because the chat template rewrites earlier answers"),
        )
        return [f"{count} {what}" for count, what in counts if count]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Report:
        values = json.loads(path.read_text(encoding="utf-8"))
        values["examples"] = [Problem(*example) for example in values["examples"]]
        return cls(**values)
