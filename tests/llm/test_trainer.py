"""The whole run against the same run written in plain PyTorch, and a resumed run against an uninterrupted one."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3MoeConfig

from mindspeed_llm.config import Config, load_config
from mindspeed_llm.data.factory import DataFactory
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.metrics import read_metrics
from mindspeed_llm.run import main
from mindspeed_llm.trainer import Trainer
from tests.distributed import launch

TOKENIZER = Path(__file__).parent.parent / "data" / "oracles" / "tokenizer"
_SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two tiny models with weights, and conversations whose answers differ widely in length."""
    folder = tmp_path_factory.mktemp("trainer")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    moe = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    configs = {"dense": Qwen3Config(**_SHAPE, vocab_size=1024), "moe": Qwen3MoeConfig(**_SHAPE, **moe, vocab_size=1024)}
    for name, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [{"instruction": f"count to {n}", "output": " ".join(map(str, range(n)))} for n in (1, 30, 2, 9, 17, 1, 40)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder


def settings(folder: Path, output_dir: Path, model: str = "dense", **training) -> Config:
    """The configuration of a short run: 7 rows in micro-batches of one and windows of three."""
    training = {
        "output_dir": str(output_dir), "per_device_train_batch_size": 1, "gradient_accumulation_steps": 3,
        "num_train_epochs": 2.0, "lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "save_steps": 0,
    } | training  # fmt: skip
    sections = {
        "model": {"model_name_or_path": str(folder / model)},
        "data": {"dataset": {"file_name": str(folder / "rows.json")}, "template": "chatml", "cutoff_len": 64},
        "parallel": {"param_dtype": "fp32"},
        "training": training,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(sections))  # JSON is YAML
    return load_config(path)


def run(config: Config) -> list[dict]:
    path = Path(config.training.output_dir).with_suffix(".yaml")
    path.write_text(config.dump_yaml())
    assert main([str(path)]) == 0
    return read_metrics(Path(config.training.output_dir) / "metrics.jsonl")


def weights(config: Config) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(Path(config.training.output_dir) / "hf", dtype=torch.float32)
    return dict(model.named_parameters())


def token_tensors(row: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [tokens] and the targets [tokens - 1] of all but the last."""
    return torch.tensor(row["input_ids"].tolist()), torch.tensor(row["labels"][1:].tolist())


def reference(config: Config, rows_per_step: int) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """The same run in plain PyTorch and transformers: a row at a time, no padding, everything written out."""
    data = DataFactory(config, AutoTokenizer.from_pretrained(TOKENIZER)).create().train
    model = AutoModelForCausalLM.from_pretrained(config.model.model_name_or_path, dtype=torch.float32)
    norms = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    steps_per_epoch = math.ceil(len(data) / rows_per_step)
    total, records = 2 * steps_per_epoch, []
    for step in range(total):
        epoch, position = divmod(step, steps_per_epoch)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(42 + epoch)).tolist()
        rows = [data[i] for i in order[position * rows_per_step :][:rows_per_step]]
        targets = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
        loss = torch.zeros(())
        for row in rows:
            ids, labels = token_tensors(row)
            logits = model(ids[None]).logits[0, :-1]
            loss = loss + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / targets
        loss.backward()
        norm = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()
        progress = (step + 1 - 2) / (total - 2)
        cosine = 1e-6 + (1e-2 - 1e-6) * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 2 if step < 2 else cosine
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 1.0 / norm)
        optimizer.step()
        optimizer.zero_grad()
        records.append(
            {"step": step + 1, "loss": loss.item(), "grad_norm": norm, "lr": optimizer.param_groups[0]["lr"],
             "tokens": sum(len(row["input_ids"]) for row in rows), "label_tokens": targets}
        )  # fmt: skip
    return records, dict(model.named_parameters())


def assert_equals_reference(config: Config, actual: list[dict], rows_per_step: int) -> None:
    expected, parameters = reference(config, rows_per_step)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-12)
        assert [ours[k] for k in ("step", "tokens", "label_tokens")] == [
            theirs[k] for k in ("step", "tokens", "label_tokens")
        ]
    for name, parameter in weights(config).items():
        error = (parameter - parameters[name]).norm() / parameters[name].norm()
        assert error <= 1e-5, f"{name} is off by {error:.1e}"


def test_one_process_equals_plain_pytorch(folder, tmp_path):
    # transformers#35203, LLaMA-Factory#7443: accumulation changed loss and gradient; transformers#35651: only what was
    # logged grew with it. The reference does not accumulate.
    config = settings(folder, tmp_path / "out")
    assert_equals_reference(config, run(config), rows_per_step=3)


def test_two_ranks_equal_plain_pytorch(folder, tmp_path):
    # torchtitan#1842, prime-rl#1957: the mean of the ranks' means gives tokens of ranks that have few more weight.
    config = settings(folder, tmp_path / "out", gradient_accumulation_steps=2)
    (tmp_path / "config.yaml").write_text(config.dump_yaml())
    finished = launch(["-m", "mindspeed_llm.run", str(tmp_path / "config.yaml")], 2)
    assert finished.returncode == 0, finished.stderr
    assert_equals_reference(config, read_metrics(tmp_path / "out" / "metrics.jsonl"), rows_per_step=4)


class StopAfter:
    """A stop request that comes once ``steps`` steps are done."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        self.trainer, self.steps = trainer, steps

    @property
    def requested(self) -> bool:
        return self.trainer.step + 1 == self.steps  # asked in the middle of a step


@pytest.mark.parametrize(("model", "optimizer"), [("dense", "adamw"), ("moe", "adamw"), ("moe", "muon")])
def test_interrupted_and_resumed_twice_equals_uninterrupted_bit_for_bit(folder, tmp_path, model, optimizer):
    options = {"num_train_epochs": 3.0, "save_hf_weights": False, "optimizer": optimizer}
    if model == "moe":
        options["router_aux_loss_coef"] = 0.1
    whole = settings(folder, tmp_path / "whole", model, **options)
    parts = settings(folder, tmp_path / "parts", model, **options, resume_from_checkpoint="auto")

    def state(config: Config, stop_after: int) -> tuple[bool, dict[str, torch.Tensor]]:
        with start() as distributed:
            trainer = Trainer(config, distributed)
            trainer.resume()
            finished = trainer.train(StopAfter(trainer, stop_after))
            return finished, {name: p.full_tensor().clone() for name, p in trainer.model.named_parameters()}

    finished, expected = state(whole, -1)
    assert finished
    assert state(parts, 3)[0] is False  # at the end of an epoch
    assert state(parts, 5)[0] is False  # in the middle of one
    finished, actual = state(parts, -1)
    assert finished
    for name, parameter in expected.items():
        assert torch.equal(actual[name], parameter), name
    timing = ("step_time", "tokens_per_second", "mfu", "memory_gib")
    records = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    whole_records, part_records = [[{k: v for k, v in r.items() if k not in timing} for r in rs] for rs in records]
    assert part_records == whole_records
    assert [r["step"] for r in whole_records] == list(range(1, 10))


def test_resuming_a_finished_run_takes_no_step(folder, tmp_path):
    config = settings(folder, tmp_path / "out", save_steps=2, resume_from_checkpoint="auto", save_hf_weights=False)
    before = run(config)
    assert run(config) == before


def evaluated(folder: Path, output_dir: Path, **training) -> tuple[float, list[tuple[float, int]]]:
    """The evaluation loss of a run in batches of two rows; each row's loss in plain PyTorch, and its targets."""
    config = settings(folder, output_dir, max_steps=4, per_device_eval_batch_size=2, **training)
    source = config.data.dataset.model_copy(update={"file_name": str(folder / "rows.json")})
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval_dataset": source})})
    record = run(config)[-1]
    data = DataFactory(config, AutoTokenizer.from_pretrained(TOKENIZER)).create().eval["eval"]
    model = AutoModelForCausalLM.from_pretrained(output_dir / "hf", dtype=torch.float32)
    rows = []
    for ids, labels in (token_tensors(data[index]) for index in range(len(data))):
        loss = F.cross_entropy(model(ids[None]).logits[0, :-1], labels, ignore_index=-100, reduction="sum").item()
        rows.append((loss, int((labels != -100).sum())))
    return record["eval_loss"], rows


def test_evaluation_is_weighted_by_tokens(folder, tmp_path):
    """Peers' report E14 (torchtitan#4167): a mean of the means of batches."""
    loss, rows = evaluated(folder, tmp_path / "out")
    assert loss == pytest.approx(sum(loss for loss, _ in rows) / sum(targets for _, targets in rows), rel=1e-6)


def test_llamafactory_averages_the_means_of_evaluation_batches(folder, tmp_path):
    """Each weighted by its rows; on these rows of 1 to 40 targets the two means are a percent apart."""
    loss, rows = evaluated(folder, tmp_path / "out", parity="llamafactory")
    batches = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    means = [sum(loss for loss, _ in batch) / sum(targets for _, targets in batch) for batch in batches]
    expected = sum(mean * len(batch) for mean, batch in zip(means, batches, strict=True)) / len(rows)
    assert loss == pytest.approx(expected, rel=1e-6)
    ours = sum(loss for loss, _ in rows) / sum(targets for _, targets in rows)
    assert abs(loss / ours - 1) > 1e-2


def test_steps_that_are_not_finite_are_skipped_and_end_the_run(folder, tmp_path, capsys):
    config = settings(folder, tmp_path / "out", lr=1e38, warmup_steps=0, max_nonfinite_steps=2, save_hf_weights=False)
    path = tmp_path / "config.yaml"
    path.write_text(config.dump_yaml())
    assert main([str(path)]) == 1
    records = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert math.isfinite(records[0]["loss"])
    assert [r["loss"] for r in records[1:]] == [None] * 2
    error = capsys.readouterr().err
    assert "error: 3 steps in a row" in error
    assert "Traceback" not in error


def test_the_output_folder_is_complete(folder, tmp_path):
    config = settings(folder, tmp_path / "out", max_steps=2, save_steps=1, save_total_limit=1)
    record = run(config)[-1]
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == ["step-00000002"]
    assert {"config.yaml", "metrics.jsonl", "loss.png", "tensorboard", "hf"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }
    assert load_config(tmp_path / "out" / "config.yaml") == config
    assert record.keys() == {
        "step", "epoch", "loss", "grad_norm", "lr", "tokens", "label_tokens", "step_time", "tokens_per_second", "mfu",
        "memory_gib",
    }  # fmt: skip


def test_the_export_stops_where_its_answers_were_trained_to_end(folder, tmp_path):
    """The model's own configuration names another token only, as that of a model which was pretrained does."""
    shutil.copytree(folder / "dense", folder / "base")
    (folder / "base" / "generation_config.json").write_text('{"eos_token_id": 5}')
    run(settings(folder, tmp_path / "out", "base", max_steps=1))
    end = AutoTokenizer.from_pretrained(TOKENIZER).convert_tokens_to_ids("<|im_end|>")
    assert json.loads((tmp_path / "out" / "hf" / "generation_config.json").read_text())["eos_token_id"] == [5, end]


def test_a_new_run_does_not_mix_with_an_earlier_ones_checkpoints(folder, tmp_path, capsys):
    earlier = settings(folder, tmp_path / "out", max_steps=2, save_steps=1, save_hf_weights=False)
    run(earlier)
    (tmp_path / "new.yaml").write_text(earlier.dump_yaml())
    for options in ([], ["--dry-run"]):
        assert main([str(tmp_path / "new.yaml"), "--training.seed=1", *options]) == 2
        assert "holds the checkpoints of an earlier run" in capsys.readouterr().err
        assert load_config(tmp_path / "out" / "config.yaml") == earlier
    resumed = [str(tmp_path / "new.yaml"), "--training.resume_from_checkpoint=auto", "--training.max_steps=3"]
    assert main([*resumed, "--dry-run"]) == 0
    assert f"goes on from {tmp_path / 'out' / 'checkpoints' / 'step-00000002'}" in capsys.readouterr().out
    assert main(resumed) == 0
    assert "goes on with other settings than before: training.max_steps: 2 -> 3\n" in capsys.readouterr().err
    assert [r["step"] for r in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3]


def test_a_tokenizer_of_another_model_is_told(folder, tmp_path, capsys):
    config = json.loads((folder / "dense" / "config.json").read_text()) | {"vocab_size": 300, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "run.yaml"
    path.write_text(settings(folder, tmp_path / "out").dump_yaml())
    overrides = [f"--model.model_name_or_path={tmp_path}", f"--model.tokenizer_name_or_path={folder / 'dense'}"]
    for options in ([], ["--dry-run"]):
        assert main([str(path), *overrides, "--model.train_from_scratch=true", *options]) == 2
        assert "has embeddings for 0 to 299 only" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written_is_told(folder, tmp_path, capsys):
    (tmp_path / "file").touch()
    path = tmp_path / "run.yaml"
    path.write_text(settings(folder, tmp_path / "file").dump_yaml())
    assert main([str(path)]) == 2
    assert f"training.output_dir: cannot write into {tmp_path / 'file'}" in capsys.readouterr().err


def test_the_balancing_loss_leaves_no_trace_in_the_export_and_needs_a_model_that_has_one(folder, tmp_path, capsys):
    config = settings(folder, tmp_path / "moe", "moe", max_steps=1, router_aux_loss_coef=0.1)
    assert run(config)[0]["aux_loss"] > 0
    exported = json.loads((tmp_path / "moe" / "hf" / "config.json").read_text())
    original = json.loads((folder / "moe" / "config.json").read_text())
    assert exported.get("output_router_logits") == original.get("output_router_logits")
    dense = settings(folder, tmp_path / "dense", max_steps=1, router_aux_loss_coef=0.1)
    (tmp_path / "dense.yaml").write_text(dense.dump_yaml())
    assert main([str(tmp_path / "dense.yaml")]) == 2
    assert ": Qwen3ForCausalLM has no load-balancing loss" in capsys.readouterr().err


def test_a_dry_run_looks_for_the_bias_that_balances(folder, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(settings(folder, tmp_path / "out", "moe", router_bias_update_rate=1e-3).dump_yaml())
    assert main([str(path), "--dry-run"]) == 2
    assert "the routers of Qwen3MoeForCausalLM have no e_score_correction_bias" in capsys.readouterr().err
