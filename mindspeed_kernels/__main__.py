"""``python -m mindspeed_kernels``: versions, this machine's instruction sets, and what each operator would run."""

from __future__ import annotations

import os
import platform

import torch

from mindspeed_kernels._loader import build_info, load_extension
from mindspeed_kernels.npu import ascendc
from mindspeed_kernels.npu.choice import OPERATORS, VARIABLE, read_choice


def report() -> str:
    """The report as text."""
    extension = load_extension()
    npu_choice = read_choice(os.environ.get(VARIABLE, ""))
    built = build_info()
    used, detected = extension.cpu_capability(), extension.detected_cpu_capability()
    built_kernels = "with" if ascendc.LIBRARY.exists() else "no"
    lowered = f" (lowered from {detected} by MINDSPEED_CPU_CAPABILITY)" if used != detected else ""
    lines = [
        f"torch             {torch.__version__} (built with {built['torch']})",
        f"python            {platform.python_version()} (built with {built['python']}, {built['compiler']})",
        f"cpu capability    {used}{lowered}",
        f"threads           {torch.get_num_threads()}",
        "",
        "kernels on the CPU, float32, bfloat16 and float16 (float64 and other devices: mindspeed_kernels.reference)",
        *(f"  {kernel.removesuffix('_kernel'):28}{level}" for kernel, level in extension.cpu_kernels().items()),
        "",
        f"operators on an NPU, chosen by {VARIABLE} ({built_kernels} AscendC kernels in this build)",
        *(f"  {operator:28}{npu_choice.first(operator)}" for operator in OPERATORS),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
