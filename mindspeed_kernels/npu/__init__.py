"""The operators on an Ascend NPU: which implementation takes a call, and where PyTorch finds it.

Three can: torch_npu's fused operators (``vendor``), the AscendC kernels of this project (``ascendc``), where they are
built, and the definition in :mod:`mindspeed_kernels.reference`. The choice among them is MINDSPEED_NPU_IMPL's
(``choice``); an implementation that a call does not fit is passed over (``dispatch``). Nothing here imports torch_npu:
whoever made a tensor on an NPU has.
"""
