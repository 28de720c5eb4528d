"""Models without data: what stays shared, what is seen of a sharded model."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from mindspeed_llm.config import ParallelConfig
from mindspeed_llm.foundation.distributed import start
from mindspeed_llm.models.initialize import initialize_weights
from mindspeed_llm.models.skeleton import canonical_name, named_state, original_class, parameters_on_meta, skeleton
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from tests.llm.models.architectures import make_config, make_model


@pytest.fixture
def sharded():
    """A tied model in one FSDP unit per layer, computing in bfloat16."""
    with start() as distributed:
        with parameters_on_meta():
            model = LlamaForCausalLM(make_config("llama_tied"))
        parallel = ParallelConfig(param_dtype="bf16")
        parallelize(model, build_meshes(parallel, 1, distributed.device), parallel)
        initialize_weights(model, 0)
        yield model


def test_a_forward_pass_does_not_change_what_is_saved(sharded):
    """FSDP leaves the root unit gathered and in bfloat16 after a forward without backward, as in an evaluation."""
    before = {key: tensor.full_tensor().clone() for key, tensor in named_state(sharded).items()}
    with torch.no_grad():
        sharded(torch.arange(12)[None], use_cache=False)
    assert not isinstance(sharded.lm_head.weight, DTensor)  # or the test shows nothing
    after = named_state(sharded)
    assert after.keys() == before.keys()
    for key, tensor in after.items():
        assert tensor.dtype == torch.float32, key
        assert torch.equal(tensor.full_tensor(), before[key]), key


def test_the_skeleton_of_a_sharded_model_is_the_plain_class(sharded):
    assert type(sharded).__name__ == "FSDPLlamaForCausalLM"
    assert original_class(sharded) is type(skeleton(sharded)) is LlamaForCausalLM
    assert skeleton(sharded).state_dict().keys() == make_model("llama_tied").state_dict().keys()


class TwoViews(LlamaForCausalLM):
    """One parameter under two names, without transformers knowing."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        shared = nn.Parameter(torch.ones(3))
        self.first, self.second = nn.ParameterList([shared]), nn.ParameterList([shared])


def test_a_parameter_of_two_modules_stays_one():
    with parameters_on_meta():
        model = TwoViews(make_config("llama"))
    assert model.first[0].is_meta
    assert model.first[0] is model.second[0]


def test_names_without_wrappers():
    name = "_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp._orig_mod.up_proj.weight"
    assert canonical_name(name) == "model.layers.0.mlp.up_proj.weight"
