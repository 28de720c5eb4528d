"""``python -m mindspeed_kernels``: versions, this machine's instruction sets, and what each operator would run."""

from __future__ import annotations

import platform

import torch

from mindspeed_kernels._loader import build_info, load_extension


def report() -> str:
    """The report as text."""
    extension = load_extension()
    built = build_info()
    used, detected = extension.cpu_capability(), extension.detected_cpu_capability()
    lowered = f" (lowered from {detected} by MINDSPEED_CPU_CAPABILITY)" if used != detected else ""
    lines = [
        f"torch             {torch.__version__} (built with {built['torch']})",
        f"python            {platform.python_version()} (built with {built['python']}, {built['compiler']})",
        f"cpu capability    {used}{lowered}",
        f"threads           {torch.get_num_threads()}",
        "",
        "kernels on the CPU, float32, bfloat16 and float16 (float64 and other devices: mindspeed_kernels.reference)",
        *(f"  {kernel.removesuffix('_kernel'):28}{level}" for kernel, level in extension.cpu_kernels().items()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
