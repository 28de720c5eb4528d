"""Fused operators in whole models: where they go, that nothing comes out differently, and the way back."""

import warnings

import pytest
import torch

from mindspeed_kernels import hf
from tests.kernels.hf.models import FAMILIES, build, distance, run, token_by_token, tokens

OPS = ("rms_norm", "rotary", "swiglu", "experts", "rms_norm_gated", "linear_attention", "documents")


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_and_results(family):
    model = build(family)
    logits, gradients = run(model)
    exact_gradients = run(token_by_token(model))[1] if FAMILIES[family].linear_attention else gradients
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that looks like an operator differs from it
        report = hf.apply(model)

    spec = FAMILIES[family]
    assert {op: len(report.fused(op)) for op in OPS} == {op: getattr(spec, op) for op in OPS}

    fused_logits, fused_gradients = run(model)
    # Rounding errors of float32 (6e-8 each) add up over two layers and the sums in them.
    assert distance({"logits": fused_logits}, {"logits": logits}) < 5e-6
    assert distance(fused_gradients, exact_gradients) < 1e-5

    report.restore()
    restored_logits, restored_gradients = run(model)
    assert torch.equal(restored_logits, logits)
    assert distance(restored_gradients, gradients) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_less_exact(family):
    """Against the model in float32, the fused bfloat16 model errs as much as the original does, or less."""
    exact = build(family)
    original = build(family, dtype=torch.bfloat16)
    exact.load_state_dict(original.state_dict())  # the same, rounded weights
    exact_logits, exact_gradients = run(exact)

    def errors() -> tuple[float, float]:
        logits, gradients = run(original)
        off = sum((gradients[n].float() - g).square().sum() for n, g in exact_gradients.items())
        size = sum(g.square().sum() for g in exact_gradients.values())
        return ((logits.float() - exact_logits).norm() / exact_logits.norm()).item(), (off / size).sqrt().item()

    before = errors()
    hf.apply(original)
    after = errors()
    assert after[0] < 1.2 * before[0]
    assert after[1] < 1.2 * before[1]


def test_a_model_on_meta_is_fused_before_it_has_weights():
    loaded = build("qwen3_next")
    expected, _ = run(loaded)

    model = build("qwen3_next", device="meta")
    report = hf.apply(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(loaded.state_dict())
    for name, buffer in loaded.named_buffers():
        model.get_buffer(name).copy_(buffer)
    logits, _ = run(model)

    assert report.errors("rms_norm").keys() == {torch.float32, torch.bfloat16}
    assert not torch.equal(logits, expected)  # the fused operators are at work
    assert distance({"logits": logits}, {"logits": expected}) < 5e-6


def test_under_autocast():
    """Half-precision activations meet float32 weights, cos and sin; what comes out has the dtype it had."""
    model = build("qwen3")
    norm = model.model.layers[0].self_attn.q_norm
    x = torch.randn(3, norm.weight.numel(), dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected, norm_dtype = run(model)[0], norm(x).dtype
        hf.apply(model)
        logits = run(model)[0]
        assert norm(x).dtype == norm_dtype == torch.float32
    assert logits.dtype == expected.dtype
    assert distance({"logits": logits}, {"logits": expected}) < 4 * torch.finfo(torch.bfloat16).eps


def test_generation_with_a_cache():
    model = build("glm4").eval()
    expected = model.generate(tokens(), max_new_tokens=8, do_sample=False)
    hf.apply(model)
    assert torch.equal(model.generate(tokens(), max_new_tokens=8, do_sample=False), expected)
    assert expected.shape == (2, 20)


def test_only_the_operators_asked_for():
    report = hf.apply(build("llama"), ["swiglu"])
    assert {site.op for site in report.sites} == {"swiglu"}
    assert report.ops == ("swiglu",)
    assert hf.apply(build("llama"), []).sites == ()


@pytest.mark.parametrize("ops", [["rmsnorm"], "rms_norm", "all"])
def test_unknown_operators_are_refused(ops):
    with pytest.raises(ValueError, match=r'expected "auto" or a list of rms_norm, rotary, swiglu'):
        hf.apply(build("llama"), ops)


def test_applied_twice_nothing_is_fused_twice():
    model = build("llama")
    first, second = hf.apply(model, ["rms_norm"]), hf.apply(model)
    assert second.fused("rms_norm") == []
    assert {site.outcome for site in second.sites if site.op == "rms_norm"} == {"not fused: has been fused before"}
    assert len(second.fused("swiglu")) == 2
    second.restore()
    first.restore()
    assert hf.apply(model, ["rms_norm"]).fused("rms_norm") == first.fused("rms_norm")


def test_a_forward_set_on_the_instance_is_kept():
    model = build("llama")
    norm = model.model.norm
    norm.forward = lambda x: x
    report = hf.apply(model, ["rms_norm"])
    assert "model.norm" not in report.fused("rms_norm")
    assert len(report.fused("rms_norm")) == 4
    assert torch.equal(norm(torch.ones(32)), torch.ones(32))


def test_the_report_is_a_table(capsys):
    report = hf.apply(build("gemma3"))
    printed = capsys.readouterr().out
    assert printed.strip() == str(report).strip()
    rows = [line.split(maxsplit=5) for line in printed.splitlines()]
    error = report.errors("rms_norm")
    numbers = [f"{error[torch.float32]:.1e}", f"{error[torch.bfloat16]:.1e}"]
    assert ["rms_norm", "13", "Gemma3RMSNorm", *numbers, "eps 1e-06, 1 + w, float32 cast order"] in rows
    assert ["swiglu", "2", "Gemma3MLP", *["not", "fused:", "the activation GELUTanh is not SiLU"]] in rows


def test_one_warning_for_the_sites_that_fared_alike():
    model = torch.nn.Sequential(*(torch.nn.LayerNorm(16, bias=False, eps=1e-6) for _ in range(3)))
    with pytest.warns(UserWarning, match="not fused") as caught:
        hf.apply(model)
    (message,) = {str(warning.message) for warning in caught}
    assert message.startswith("rms_norm: LayerNorm (0 and 2 more) not fused: differs by")
    assert len(caught) == 1
