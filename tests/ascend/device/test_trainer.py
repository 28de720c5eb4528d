"""A model and the trainer on the NPU equal those on the CPU.

PyTorch's own operators run on the host's memory (host_memory.py), fused ones as models of torch_npu's or as AscendC
kernels on their twin, collectives in a group of one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mindspeed_kernels import hf
from mindspeed_llm.config import TrainingConfig
from mindspeed_llm.errors import UserError
from mindspeed_llm.foundation.device import select_device
from mindspeed_llm.foundation.profiler import _profiler
from mindspeed_llm.metrics import read_metrics
from mindspeed_llm.run import main
from tests.ascend.device.device import Device, implementation

TOKENIZER = Path(__file__).parents[2] / "data" / "oracles" / "tokenizer"
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "vocab_size": 1024,
}  # fmt: skip


EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def tiny_model(dtype: torch.dtype = torch.float32, *, experts: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)) if experts else Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return model.to(dtype)


VENDOR = {
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_rotary_mul",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
}
VENDOR_EXPERTS = {"npu_moe_token_permute", "npu_grouped_matmul", "npu_swiglu", "npu_swiglu_backward"}
ASCENDC = {"rms_norm", "rotary_backward", "swiglu", "flash_attention_forward", "flash_attention_backward"}
ASCENDC_EXPERTS = {"moe_permute", "grouped_gemm", "grouped_gemm_weight_gradient", "moe_unpermute_backward"}


@pytest.mark.parametrize(
    ("text", "dtype", "experts", "kinds"),
    [
        ("", torch.float32, False, VENDOR),
        ("", torch.float32, True, VENDOR | VENDOR_EXPERTS),
        ("ascendc", torch.float32, True, {f"ascendc {op}" for op in ASCENDC | ASCENDC_EXPERTS}),
        ("ascendc", torch.bfloat16, False, {f"ascendc {op}" for op in ASCENDC}),
        ("ascendc", torch.bfloat16, True, {f"ascendc {op}" for op in ASCENDC | ASCENDC_EXPERTS}),
    ],
)
def test_a_layer(device: Device, text: str, dtype: torch.dtype, experts: bool, kinds: set[str]):
    model = tiny_model(experts=experts)
    hf.use_attention(model)
    hf.apply(model)
    model.to(dtype)
    ids = torch.randint(0, 1024, (2, 13))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    device.called.clear()
    with implementation(text):
        model.to("npu")
        moved = ids.to("npu")
        found = model(input_ids=moved, labels=moved, use_cache=False).loss
        found.backward()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.detach().cpu(), loss.detach(), rtol=8 * eps, atol=0)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        scale = grad.abs().max().item()
        torch.testing.assert_close(parameter.grad.cpu(), grad, rtol=0, atol=32 * eps * scale)
    assert kinds <= set(device.called)


def test_the_trainer(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny_model().save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(tmp_path / "model")
    rows = [{"instruction": f"count to {n}", "output": " ".join(map(str, range(n)))} for n in (1, 12, 2)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))

    def run(kind: str) -> list[dict]:
        monkeypatch.setenv("MINDSPEED_DEVICE", kind)
        config = {
            "model": {"model_name_or_path": str(tmp_path / "model")},
            "data": {"dataset": {"file_name": str(tmp_path / "rows.json")}, "template": "chatml", "cutoff_len": 64},
            "parallel": {"param_dtype": "fp32"},
            "training": {"output_dir": str(tmp_path / kind), "max_steps": 2, "lr": 1e-2, "save_steps": 2},
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        assert main([str(tmp_path / "config.yaml")]) == 0
        return read_metrics(tmp_path / kind / "metrics.jsonl")

    expected = run("cpu")
    device.called.clear()
    with implementation(""):
        found = run("npu")
    eps = torch.finfo(torch.float32).eps
    for step, reference in zip(found, expected, strict=True):
        assert step["loss"] == pytest.approx(reference["loss"], rel=8 * eps)
        assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=32 * eps)
        assert step["memory_gib"] > 0
    assert "npu_fusion_attention" in device.called


def test_a_wrong_choice_of_operators_is_a_users_error(device: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "npu")
    with implementation("torch-npu"), pytest.raises(UserError, match="did you mean torch_npu"):
        select_device(0)


def test_the_profiler_is_torch_npus(device: Device, tmp_path: Path):
    """It takes our arguments. To start it needs more than the stand-in for CANN has."""
    config = TrainingConfig(
        output_dir="", profile_save_path=str(tmp_path), profile_level="level1", profile_with_cpu=True
    )
    profiler = _profiler(config, 0, torch.device("npu"))
    assert type(profiler).__module__.startswith("torch_npu.profiler")
    assert {activity.name for activity in profiler.prof_if.activities} == {"CPU", "NPU"}
    profiler.stopped = True  # it would write into the working directory when it goes
