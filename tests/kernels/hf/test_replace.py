"""A fused module remains the module it was to everything that handles modules, and nothing but it has changed."""

import copy
import importlib
import io
import pickle
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mindspeed_kernels import hf
from mindspeed_kernels.hf.replace import fusion_of
from tests.kernels.hf.models import FAMILIES, build, distance, run


def fused_modules(model: nn.Module) -> int:
    return sum(fusion_of(module) is not None for module in model.modules())


def everything_in(module: types.ModuleType) -> dict[str, int]:
    """The identity of all that a library's module defines, and of all that its classes and functions consist of."""
    found = {}
    for name, value in vars(module).items():
        found[name] = id(value)
        if isinstance(value, type | types.FunctionType):
            # copy.deepcopy notes in a class where its slots are, the first time that it meets it.
            found |= {f"{name}.{key}": id(v) for key, v in vars(value).items() if key != "__slotnames__"}
        if isinstance(value, types.FunctionType):
            found |= {f"{name}.__code__": id(value.__code__), f"{name}.__globals__": id(value.__globals__)}
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_is_as_it_was(family):
    model, other = build(family), build(family)
    library = importlib.import_module(type(model).__module__)
    before, other_before = everything_in(library), run(other)[0]
    hf.apply(model)
    run(model)
    assert everything_in(library) == before
    assert fused_modules(other) == 0
    assert torch.equal(run(other)[0], other_before)


def test_classes_names_and_state_remain():
    model = build("qwen3")
    modules = dict(model.named_modules())
    before = {name: (type(module), str(module)) for name, module in modules.items()}
    state = dict(model.state_dict())
    hf.apply(model)
    assert fused_modules(model) == 13
    for name, module in modules.items():
        cls, text = before[name]
        assert isinstance(module, cls)
        assert (type(module).__name__, type(module).__module__) == (cls.__name__, cls.__module__)
        assert str(module) == text
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == {n: t.data_ptr() for n, t in state.items()}


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_fused_and_has_its_own_weights(copied):
    model = build("glm4")
    hf.apply(model)
    logits, _ = run(model)
    twin = copied(model)
    assert fused_modules(twin) == fused_modules(model) > 0
    assert torch.equal(run(twin)[0], logits)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run(twin)[0], logits)
    assert not torch.equal(run(model)[0], logits)


def test_saved_whole_and_loaded():
    model = build("llama")
    hf.apply(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(run(torch.load(file, weights_only=False))[0], run(model)[0])


def test_hooks_run_on_the_modules_and_inside_them():
    model = build("llama")
    called = []
    layer = model.model.layers[0]
    for name in ("input_layernorm", "mlp", "mlp.gate_proj", "mlp.down_proj", "self_attn"):
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    hf.apply(model)
    run(model)
    assert called == ["input_layernorm", "self_attn", "mlp.gate_proj", "mlp.down_proj", "mlp"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    model = build("qwen3")
    hf.apply(model)
    logits, gradients = run(model)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    recomputed_logits, recomputed_gradients = run(model)
    assert torch.equal(recomputed_logits, logits)
    assert distance(recomputed_gradients, gradients) == 0


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("family", ["qwen3", "glm4"])
def test_compiled_in_one_graph(family):
    model = build(family)
    hf.apply(model)
    logits, gradients = run(model)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        compiled_logits, compiled_gradients = run(compiled)
    assert backend.frame_count == 1  # and its guards hold the second time
    targets = {str(node.target) for node in backend.graphs[0].graph.nodes}
    assert {"mindspeed.rms_norm", "mindspeed.rotary", "mindspeed.swiglu"} <= {
        t.removesuffix(".default") for t in targets
    }
    assert distance({"logits": compiled_logits}, {"logits": logits}) < 5e-6
    assert distance({n.removeprefix("_orig_mod."): g for n, g in compiled_gradients.items()}, gradients) < 1e-5


@pytest.mark.usefixtures("fresh_compiler")
def test_layers_compiled_one_by_one_share_a_compilation():
    model = build("qwen3")
    hf.apply(model)
    logits, _ = run(model)
    backend = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    assert distance({"logits": run(model)[0]}, {"logits": logits}) < 5e-6
    assert backend.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_inductor():
    model = build("llama")
    hf.apply(model)
    logits, gradients = run(model)
    compiled_logits, compiled_gradients = run(torch.compile(model, fullgraph=True))
    assert distance({"logits": compiled_logits}, {"logits": logits}) < 5e-6
    assert distance({n.removeprefix("_orig_mod."): g for n, g in compiled_gradients.items()}, gradients) < 1e-5


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_fully_shard(mesh, param_dtype):
    def sharded(model: nn.Module) -> nn.Module:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
        return model

    original, model = sharded(build("qwen3")), build("qwen3")
    report = hf.apply(model)
    sharded(model)
    (expected, expected_gradients), (logits, gradients) = run(original), run(model)
    eps = torch.finfo(param_dtype or torch.float32).eps
    full = [{n: g.full_tensor() for n, g in grads.items()} for grads in (gradients, expected_gradients)]
    assert not torch.equal(logits, expected)
    assert distance({"logits": logits}, {"logits": expected}) < 40 * eps
    assert distance(*full) < 80 * eps

    report.restore()  # the sites themselves have not been wrapped
    assert torch.equal(run(model)[0], expected)


def test_restoring_what_has_been_given_another_class_is_refused(mesh):
    model = build("llama")
    report = hf.apply(model)
    fully_shard(model.model.layers[0].mlp, mesh=mesh)
    with pytest.raises(RuntimeError, match="FSDPLlamaMLP has been given another class since it was fused"):
        report.restore()
