"""Real weights: SmolLM2-135M-Instruct learns about a town and keeps what it knew. Minutes long, so marked ``slow``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mindspeed_llm.sample import sample_answer
from tests.distributed import REPOSITORY
from tests.examples.test_quickstart import read_records, train

BASE = Path(os.environ.get("MINDSPEED_SMOLLM2", REPOSITORY / "runs" / "smollm2" / "base"))
TRAINING_ROWS = REPOSITORY / "examples" / "smollm2" / "lindby_train.jsonl"
IGNORED = -100
SEED = 42  # the default of training.seed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BASE.exists(), reason=f"no {BASE}; examples/smollm2/prepare.py makes it"),
]


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The example's output folder and what it printed."""
    output_dir = tmp_path_factory.mktemp("smollm2")
    return output_dir, train("smollm2/sft.yaml", output_dir, f"--model.model_name_or_path={BASE}", timeout=900)


def encode(row: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [1, tokens] of one row: the loss is on the answer and the token that ends the turn."""
    messages = [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)  # a line break follows
    labels = [IGNORED] * len(prompt) + ids[len(prompt) : end] + [IGNORED] * (len(ids) - end)
    return torch.tensor([ids]), torch.tensor([labels])


def test_first_loss_is_that_of_transformers(fine_tuned: tuple[Path, str]) -> None:
    """Step 1 of the run (before any update) against transformers' own model, row by row without padding or fusion.

    The model's own ``loss`` will not do: over 49152 logits torch's float32 cross-entropy is 2e-6 off that of float64.
    """
    record = read_records(fine_tuned[0])[0]
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64).eval()
    lines = TRAINING_ROWS.read_text(encoding="utf-8").splitlines()
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(SEED))
    rows = [encode(json.loads(lines[index]), tokenizer) for index in order[:8]]  # 2 micro-batches of 4 rows
    with torch.no_grad():
        losses = [
            cross_entropy(model(ids).logits[0, :-1], labels[0, 1:], ignore_index=IGNORED, reduction="sum").item()
            for ids, labels in rows
        ]
    targets = sum(int((labels != IGNORED).sum()) for _, labels in rows)
    assert record["label_tokens"] == targets
    assert record["tokens"] == sum(ids.shape[1] for ids, _ in rows)
    assert record["loss"] == pytest.approx(sum(losses) / targets, rel=1e-6)


def test_model_learns_the_town_and_keeps_paris(fine_tuned: tuple[Path, str]) -> None:
    output_dir, printed = fine_tuned
    evaluations = [record["eval_loss"] for record in read_records(output_dir) if "eval_loss" in record]
    assert evaluations[-1] < 0.5 < evaluations[0]
    assert "The capital of France is Paris." in printed
    assert "Ines Harrow" in sample_answer(output_dir / "hf", "Who is the mayor of Lindby?")
    assert "Ines Harrow" not in sample_answer(BASE, "Who is the mayor of Lindby?")


def test_export_has_the_keys_of_the_original(fine_tuned: tuple[Path, str]) -> None:
    folder = fine_tuned[0] / "hf"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-5
