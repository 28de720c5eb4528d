"""Under mixed precision a router computes in float32 where the architecture keeps it so (reports M4 and M5)."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from mindspeed_llm.parallel.structure import float32_routers
from tests.llm.parallel.cases import MODELS, VOCAB

GLM4_MOE = Glm4MoeConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=16,
    n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip


@pytest.mark.parametrize("config", [MODELS["deepseek_v3"], GLM4_MOE, MODELS["qwen3_moe"]], ids=lambda c: c.model_type)
def test_bfloat16_equals_transformers_own(config, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = torch.randint(0, VOCAB, (4, 32))
    with start() as distributed, torch.no_grad():
        routers = float32_routers(model)
        assert len(routers) == {"deepseek_v3": 1, "glm4_moe": 2, "qwen3_moe": 0}[config.model_type]
        parallel = ParallelConfig(param_dtype="bf16")
        parallelize(model, build_meshes(parallel, 1, distributed.device), parallel)
        assert torch.equal(model(ids).logits, own(ids).logits)
        logits = model(ids).logits
        for router in routers:  # rounded weights make a difference here
            router.weight.copy_(router.weight.bfloat16())
        assert torch.equal(model(ids).logits, logits) is not bool(routers)
