"""Whole training steps side by side, on a Qwen3 of 26 million parameters in bfloat16, 2 x 1024 tokens a step.

    python -m benchmarks.training ranks    # one rank with two threads, two ranks with one thread each (fsdp, ep, cp)
    python -m benchmarks.training memory   # with the allocator's set-up (foundation/host_memory.py), and as glibc comes

Contestants are runs of the trainer, in turns; a number is the median over all steps of all rounds but each run's first
ones. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environment import openmp

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
WARM_UP, STEPS = 3, 13
DENSE = {
    "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = DENSE | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """One way to train: ranks and threads of each, the layout, and the program that is started."""

    name: str
    ranks: int = 1
    threads: int = 2
    model: Mapping = field(default_factory=lambda: DENSE)
    layout: Mapping[str, object] = field(default_factory=dict)
    program: Sequence[str] = ("-m", "mindspeed_llm.run")
    accumulation: int = 1


RANKS = [
    Contestant("dense, 1 rank x 2 threads", accumulation=2),
    Contestant("dense, 2 ranks x 1 thread, fsdp", 2, 1),
    Contestant("dense, 2 ranks x 1 thread, cp ring", 2, 1, layout={"cp_size": 2, "cp_type": "ring"}, accumulation=2),
    Contestant("experts, 1 rank x 2 threads", model=EXPERTS, accumulation=2),
    Contestant("experts, 2 ranks x 1 thread, fsdp", 2, 1, EXPERTS),
    Contestant("experts, 2 ranks x 1 thread, ep", 2, 1, EXPERTS, {"ep_size": 2}),
]
_WITHOUT_SET_UP = "import sys; from mindspeed_llm.run import main; sys.exit(main())"
MEMORY = [Contestant("set up"), Contestant("as glibc comes", program=("-c", _WITHOUT_SET_UP))]


def write_model(folder: Path, settings: Mapping) -> None:
    """A model folder without weights: the quickstart's tokenizer and a larger model."""
    folder.mkdir(parents=True)
    for file in (QUICKSTART / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    vocab_size = json.loads((QUICKSTART / "model" / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": vocab_size}))


def run(contestant: Contestant, folder: Path) -> tuple[list[float], int]:
    """Seconds of each step after the first ones, and the page faults of the whole run."""
    write_model(folder / "model", contestant.model)
    sections = {
        "model": {"model_name_or_path": str(folder / "model"), "train_from_scratch": True},
        "data": {
            "dataset": {"file_name": str(QUICKSTART / "text.jsonl"), "columns": {"prompt": "text"}},
            "cutoff_len": 1024,
            "packing": True,
        },
        "parallel": dict(contestant.layout),
        "training": {
            "stage": "pt", "output_dir": str(folder / "out"), "max_steps": STEPS, "save_steps": 0, "lr": 1e-3,
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": contestant.accumulation,
        },
    }  # fmt: skip
    config = folder / "config.yaml"
    config.write_text(json.dumps(sections))
    several = ["--nproc", str(contestant.ranks)] if contestant.ranks > 1 else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    finished = subprocess.run(
        [sys.executable, *contestant.program, str(config), *several],
        env={**os.environ, **_openmp(contestant)},
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        sys.exit(f"{contestant.name} failed:\n{finished.stderr[-3000:]}")
    faults = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before
    records = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [record["step_time"] for record in records if "step_time" in record][WARM_UP:], faults


def _openmp(contestant: Contestant) -> Mapping[str, str]:
    # Pinned, both ranks' only threads would be on the first core.
    return openmp(contestant.threads) if contestant.ranks == 1 else {"OMP_NUM_THREADS": str(contestant.threads)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ranks", "memory"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    contestants = RANKS if options.what == "ranks" else MEMORY
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    faults: dict[str, list[int]] = {contestant.name: [] for contestant in contestants}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for contestant in contestants:
                times, pages = run(contestant, Path(folder) / str(number) / contestant.name)
                seconds[contestant.name] += times
                faults[contestant.name].append(pages)
    print("| run | seconds a step | page faults |\n| --- | --- | --- |")
    for name, times in seconds.items():
        print(f"| {name} | {statistics.median(times):.3f} | {statistics.median(faults[name]):,.0f} |")


if __name__ == "__main__":
    main()
