"""Every barrier and every wait of every kernel is needed, and the twin sees when one is missing.

A kernel is run as often as it has places that wait, each time with another one without effect (the twin's
``dropped_sync``, which is the same as deleting the line; ``test_deleting_the_line`` deletes one). At least one of the
kernel's cases must then be reported, though the numbers mostly come out right on the CPU.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mindspeed_kernels.ascend_twin import AscendTwin
from tests.ascend.native import ROOT, kernels

Case = Callable[[AscendTwin], object]


def swiglu_cases() -> list[Case]:
    """Halves of one tensor, so that a core has several tiles."""
    both, grad = torch.randn(40, 48), torch.randn(40, 24)
    return [lambda twin: twin.swiglu(both), lambda twin: twin.swiglu_backward(grad, both)]


def rms_norm_cases() -> list[Case]:
    """Whole rows and rows in parts, with and without everything that is optional."""
    cases: list[Case] = []
    for rows, hidden in ((20, 24), (3, 8200)):
        x, weight, rstd = torch.randn(rows, hidden).bfloat16(), torch.ones(hidden), torch.ones(rows)

        def forward(twin: AscendTwin, x=x, weight=weight) -> None:
            twin.rms_norm(x, weight, eps=1e-6, round_before_weight=True, residual=x)

        def backward(twin: AscendTwin, x=x, weight=weight, rstd=rstd) -> None:
            twin.rms_norm_backward(x, x, weight, rstd, round_before_weight=True, grad_sum=x)

        def plain(twin: AscendTwin, x=x, rstd=rstd) -> None:
            twin.rms_norm(x, None, eps=1e-6, round_before_weight=False)

        def plain_backward(twin: AscendTwin, x=x, rstd=rstd) -> None:
            twin.rms_norm_backward(x, x, None, rstd, round_before_weight=False)

        cases += [forward, backward, plain, plain_backward]
    return cases


def rotary_cases() -> list[Case]:
    q, k, cos = torch.randn(1, 3, 4, 24).bfloat16(), torch.randn(1, 1, 4, 24).bfloat16(), torch.randn(1, 4, 20)
    return [
        lambda twin: twin.rotary(q, k, cos.bfloat16(), cos.bfloat16()),
        lambda twin: twin.rotary(q, k, cos.bfloat16(), cos.bfloat16(), interleaved=True),
    ]


def moe_permute_cases() -> list[Case]:
    x, source = torch.randn(3, 24).half(), torch.tensor([5, 0, -1, 2, 3, 4])
    position, weights, y = torch.tensor([[1, -1], [3, 4], [5, 0]]), torch.rand(3, 2), torch.randn(6, 24).half()
    return [
        lambda twin: twin.moe_permute(x, source, 2),
        lambda twin: twin.moe_unpermute(y, position, weights),
        lambda twin: twin.moe_unpermute_backward(x, y, source, weights),
    ]


def grouped_gemm_cases() -> list[Case]:
    x, grad_y, offsets = torch.randn(40, 300).half(), torch.randn(40, 20).half(), torch.tensor([30, 40]).int()
    weight = torch.randn(2, 20, 300).half()
    return [
        lambda twin: twin.grouped_gemm(x, weight, offsets),
        lambda twin: twin.grouped_gemm_weight_gradient(grad_y, x, offsets),
    ]


def flash_attention_cases() -> list[Case]:
    """Several tiles of keys with a mask, queries that see nothing, so few that one vector core has none, a softcap."""
    q, kv, statistics = torch.randn(140, 2, 16).bfloat16(), torch.randn(300, 1, 16).bfloat16(), torch.ones(2, 140)
    few, few_statistics = q[:20].contiguous(), statistics[:, :20].contiguous()
    nothing = torch.tensor([-200])
    return [
        lambda twin: twin.flash_attention(q, kv, kv, window=200),
        lambda twin: twin.flash_attention(q, kv, kv, query_offsets=nothing),
        lambda twin: twin.flash_attention_backward(q, None, q, kv, kv, q, statistics, window=200),
        lambda twin: twin.flash_attention_backward(q, None, q, kv, kv, q, statistics, query_offsets=nothing),
        lambda twin: twin.flash_attention_backward(few, None, few, kv, kv, few, few_statistics),
        lambda twin: twin.flash_attention(few, kv, kv, softcap=2.0),
        lambda twin: twin.flash_attention_backward(few, None, few, kv, kv, few, few_statistics, softcap=2.0),
    ]


KERNELS = {
    "swiglu": swiglu_cases,
    "rms_norm": rms_norm_cases,
    "rotary": rotary_cases,
    "moe_permute": moe_permute_cases,
    "grouped_gemm": grouped_gemm_cases,
    "flash_attention": flash_attention_cases,
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_wait_is_needed(name: str):
    cases = KERNELS[name]()
    sites: dict[str, list[Case]] = {}
    for case in cases:
        twin = kernels()
        case(twin)
        for site in twin.report.sync_sites:
            sites.setdefault(site, []).append(case)
    assert sites

    def is_missed(site: str) -> bool:
        for case in sites[site]:
            twin = kernels(dropped_sync=site, tolerant=True)
            case(twin)
            if any("is missing between them" in error for error in twin.report.errors):
                return True
        return False

    unneeded = [site for site in sorted(sites) if not is_missed(site)]
    assert not unneeded, unneeded


def test_deleting_the_line(tmp_path: Path):
    """What `dropped_sync` does is what deleting the barrier does."""
    shutil.copytree(ROOT / "csrc" / "ascend", tmp_path / "ascend")
    kernel = tmp_path / "ascend" / "kernels" / "swiglu.h"
    lines = kernel.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "PipeBarrier<PIPE_V>();" in line)
    del lines[first]
    kernel.write_text("\n".join(lines))
    library = tmp_path / "_ascend_twin.so"
    include = [f"-I{tmp_path / 'ascend'}", f"-I{tmp_path / 'ascend' / 'twin'}"]
    sources = [tmp_path / "ascend" / "launch" / name for name in ("twin_swiglu.cpp", "swiglu.asc")]
    command = ["c++", "-std=c++17", "-shared", "-fPIC", "-pthread", "-DMINDSPEED_ASCEND_TWIN", *include, "-x", "c++"]
    subprocess.run([*command, *sources, "-o", library], check=True)
    twin = AscendTwin(library, tolerant=True)
    twin.swiglu(*torch.randn(2, 40, 24))
    assert any("on pipe V while Muls" in error for error in twin.report.errors), twin.report.errors
