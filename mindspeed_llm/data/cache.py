"""Preparing data once: by whichever process comes first, for all that follow, in this run and the next."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def fingerprint(parts: Iterable[object]) -> str:
    """A name for what these values describe; they must print the same in every process."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def code_fingerprint() -> str:
    """Changes with the code of this package, and with it what it would prepare."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return fingerprint(file.read_bytes() for file in files)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return fingerprint([type(tokenizer).__name__, vocabulary, tokenizer.special_tokens_map, tokenizer.chat_template,
                        getattr(tokenizer, "add_bos_token", None)])  # fmt: skip


def prepare_once(folder: Path, key: str, prepare: Callable[[Path], None]) -> Path:
    """``folder/key``, filled by ``prepare`` unless that was done before.

    A file lock chooses the one process that prepares. The others wait for the file system and not in a collective, so
    no time-out cuts a long preparation short; without a shared file system every machine prepares its own. If the
    process dies the lock is free again. The folder appears by renaming, complete or not at all.
    """
    target = folder / key
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{key}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        logger.info("waiting for another process that prepares the data in %s", target)
        lock.acquire()
    try:
        if not target.is_dir():
            temporary = folder / f".{key}-{socket.gethostname()}-{os.getpid()}"
            try:
                prepare(temporary)
                os.rename(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    finally:
        lock.release()
    return target
