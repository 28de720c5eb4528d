"""Several local ranks: where they meet, how they stop, and whose error is shown."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from mindspeed_llm.launch import launch


@pytest.fixture(autouse=True)
def _single_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def start(case: str, folder: Path) -> int:
    return launch(["-m", "tests.llm.launched", case, str(folder)], 2)


def test_ranks_meet_although_the_usual_port_is_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        assert start("add_up", tmp_path) == 0
    out, err = capfd.readouterr()
    assert out.count(f"sum 1 threads {max(1, (os.cpu_count() or 1) // 2)}") == 2
    assert err == ""
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers  # ours are put back


@pytest.mark.parametrize(
    ("case", "status", "message"),
    [
        ("bug", 1, "RuntimeError: rank one has a bug"),
        ("bad_data", 2, "error: train.jsonl:7: not JSON"),
        ("everyone_fails", 2, "error: no row can be used"),
        ("crash", 1, "rank 1 was killed by SIGSEGV"),
    ],
)
def test_the_error_that_came_first_is_shown_once(
    case: str, status: int, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(case, tmp_path) == status
    err = capfd.readouterr().err
    assert err.count(message) == 1
    assert err.count("Traceback") == (1 if case == "bug" else 0)
    assert "Connection" not in err  # what rank 0 met when rank 1 was gone
    if status == 2:
        assert err == f"{message}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_every_rank_finish(number: signal.Signals, tmp_path: Path) -> None:
    def send_when_stepping() -> None:
        while len(list(tmp_path.glob("stepping-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=send_when_stepping, daemon=True).start()
    assert start("step_until_asked", tmp_path) == 0
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
