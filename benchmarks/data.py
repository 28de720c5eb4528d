"""Preparing data side by side with the systems it must agree with.

    python -m benchmarks.data rows --peer-python LLAMAFACTORY_VENV/bin/python
    python -m benchmarks.data indices --peer-python MEGATRON_VENV/bin/python

``rows``: generated conversations through reading, template, tokenisation and packing, by one process and by two, and
through LLaMA-Factory's own pipeline (0.9.5). ``indices``: the order of a corpus of many documents, and by the
GPTDataset of Megatron-core (0.16.1), which has NumPy's shuffles and a C++ helper. Peers live in environments of their
own, are given the same files and do not use their caches. Without ``--peer-python`` only ours is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ORACLES = Path(__file__).parent.parent / "tests" / "data" / "oracles"
TOKENIZER = ORACLES / "tokenizer"

# Prints the seconds that LLaMA-Factory takes from files to rows; arguments: folder, workers.
_LLAMAFACTORY = """
import sys, time
from transformers import AutoTokenizer
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
folder, workers, tokenizer = sys.argv[1:]
arguments = dict(model_name_or_path=tokenizer, stage="sft", do_train=True, finetuning_type="full", dataset="rows",
    dataset_dir=folder, template="qwen3", cutoff_len=2048, packing=True, preprocessing_num_workers=int(workers),
    overwrite_cache=True, output_dir=folder + "/out", report_to="none", use_cpu=True, cache_dir=folder + "/cache")
model, data, training, _, _ = get_train_args(arguments)
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
template = get_template_and_fix_tokenizer(tokenizer, data)
start = time.perf_counter()
rows = get_dataset(template, model, data, training, "sft", tokenizer)["train_dataset"]
print("RESULT", time.perf_counter() - start, len(rows))
"""

# Prints the seconds that Megatron-core takes for its three indices; arguments: prefix, length, samples.
_MEGATRON = """
import sys, time
import numpy, torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
prefix, length, samples = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
class Tokenizer:
    eod = 0; pad = 0; vocab_size = 1000; unique_identifiers = {}
config = GPTDatasetConfig(random_seed=1234, sequence_length=length, blend=([prefix], None), split="1,0,0",
    path_to_cache=None, tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
    eod_mask_loss=False, create_attention_mask=False)
documents = IndexedDataset(prefix)
indices = numpy.arange(len(documents), dtype=numpy.int32)
start = time.perf_counter()
data = GPTDataset(documents, prefix, indices, samples, Split.train, config)
print("RESULT", time.perf_counter() - start, len(data))
"""


def peer(python: str, script: str, *arguments: object) -> tuple[float, int]:
    """Seconds and number of rows or samples that a script in another environment reports."""
    environment = {**os.environ, "DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONPATH", None)
    finished = subprocess.run(
        [python, "-c", script, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    if finished.returncode:
        sys.exit(f"{python} failed:\n{finished.stderr[-3000:]}")
    words = next(line for line in finished.stdout.splitlines() if line.startswith("RESULT")).split()
    return float(words[1]), int(words[2])


def best(measure: Callable[[], tuple[float, int]], repeats: int) -> tuple[float, int]:
    return min(measure() for _ in range(repeats))


def write_conversations(folder: Path, rows: int) -> None:
    """Questions and answers of 10 to 120 words each, from the words of the recorded rows."""
    words = " ".join(row["output"] for row in json.loads((ORACLES / "data" / "alpaca.json").read_text())).split()
    choose = random.Random(0)

    def text(least: int, most: int) -> str:
        start = choose.randrange(len(words) - most)
        return " ".join(words[start : start + choose.randint(least, most)])

    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(rows):
            row = {"instruction": text(10, 60), "input": "", "output": text(10, 120)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.jsonl"}}))


def prepare_rows(folder: Path, workers: int) -> tuple[float, int]:
    """Seconds for our preparation, and its rows."""
    from transformers import AutoTokenizer

    from mindspeed_llm.config import Config
    from mindspeed_llm.data.factory import DataFactory

    config = Config.model_validate(
        {
            "model": {"model_name_or_path": str(TOKENIZER)},
            "data": {"dataset": "rows", "dataset_dir": str(folder), "template": "qwen3", "cutoff_len": 2048,
                     "packing": True, "preprocessing_num_workers": workers},
            "training": {"output_dir": str(folder / "out"), "parity": "llamafactory"},
        }
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    with tempfile.TemporaryDirectory() as store:
        start = time.perf_counter()
        rows = DataFactory(config, tokenizer, folder=Path(store)).create().train
        return time.perf_counter() - start, len(rows)  # type: ignore[arg-type]


def compare_rows(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_conversations(folder, options.rows)
        print(f"{options.rows} conversations, template qwen3, packed into rows of 2048 tokens")
        for workers in options.workers:
            ours = best(lambda workers=workers: prepare_rows(folder, workers), options.repeats)  # type: ignore[misc]
            line = f"  {workers} process(es): ours {ours[0]:.1f} s ({options.rows / ours[0]:.0f} rows/s)"
            if options.peer_python:
                arguments = (options.peer_python, _LLAMAFACTORY, folder, workers, TOKENIZER)
                theirs = best(lambda arguments=arguments: peer(*arguments), options.repeats)  # type: ignore[misc]
                assert theirs[1] == ours[1], "both must make the same rows"
                line += f", LLaMA-Factory {theirs[0]:.1f} s: {theirs[0] / ours[0]:.2f}x"
            print(line)


def write_corpus(prefix: Path, documents: int) -> None:
    """An index of documents of 1 to 2000 tokens whose tokens are a hole in the file."""
    from mindspeed_llm.data.megatron.indexed import HEADER, MAGIC

    lengths = np.random.default_rng(0).integers(1, 2001, documents, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        for part in (lengths, ends - lengths * np.int64(2), np.arange(documents + 1)):
            part.tofile(file)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(int(ends[-1]))


def build_indices(prefix: Path, length: int, samples: int) -> tuple[float, int]:
    """Seconds for our order, and its samples."""
    from mindspeed_llm.data.megatron.indexed import IndexedTokens
    from mindspeed_llm.data.megatron.indices import build_order

    tokens = IndexedTokens(prefix)
    start = time.perf_counter()
    order = build_order(tokens.lengths, range(len(tokens)), sequence_length=length, seed=1234, num_samples=samples)
    return time.perf_counter() - start, len(order.shuffle_index)


def compare_indices(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        prefix = Path(name) / "corpus"
        write_corpus(prefix, options.documents)
        samples = options.documents * 1000 // options.length * 3 // 2  # one and a half epochs
        ours = best(lambda: build_indices(prefix, options.length, samples), options.repeats)
        line = f"{options.documents} documents, {ours[1]} samples of {options.length} tokens: ours {ours[0]:.2f} s"
        if options.peer_python:
            arguments = (options.peer_python, _MEGATRON, prefix, options.length, samples)
            theirs = best(lambda: peer(*arguments), options.repeats)
            assert theirs[1] == ours[1], "both must make the same samples"
            line += f", Megatron-core {theirs[0]:.2f} s: {theirs[0] / ours[0]:.2f}x"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rows", "indices"])
    parser.add_argument("--peer-python", help="the interpreter of an environment that has the peer")
    parser.add_argument("--rows", type=int, default=100_000, help="a multiple of 2000: both pack 1000 rows at a time")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    compare_rows(options) if options.what == "rows" else compare_indices(options)


if __name__ == "__main__":
    main()
