"""Run by test_loss_head.py on two ranks: a sharded head, its own unit or tied in the root, computes the loss."""

import torch

from mindspeed_llm.accumulate import count_step, forward_backward
from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.models.loss_head import fuse_loss
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.llm.parallel.cases import build_model, rows

CASE: dict = {"ranks": 2, "accumulation": 2, "packed": False, "parallel": {}}

with start() as distributed:
    for name, reshard in (("qwen3", True), ("qwen3", False), ("tied_llama", True), ("qwen3_moe", True)):
        results = []
        for fused in (False, True):
            parallel = ParallelConfig(param_dtype="fp32", reshard_after_forward=reshard)
            model = build_model(name)
            if fused:
                assert fuse_loss(model, chunk=5)
            parallelize(model, build_meshes(parallel, distributed.world_size, distributed.device), parallel)
            window = rows(CASE)[0][distributed.rank :: distributed.world_size]
            counts = count_step(window, distributed)
            losses = distributed.sum(forward_backward(model, window, counts, 0.1 if name == "qwen3_moe" else 0.0))
            gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
            results.append((torch.tensor(losses), gradients))
        (plain_losses, plain), (losses, gradients) = results
        torch.testing.assert_close(losses, plain_losses, rtol=1e-6, atol=0)
        assert gradients.keys() == plain.keys()
        for parameter, expected in plain.items():
            error = (gradients[parameter] - expected).norm() / expected.norm()
            assert error <= 1e-5, (name, parameter, error)
