"""The twin catches every kind of bug that is seeded, says where it is, and accepts the same kernel without it."""

from __future__ import annotations

import pytest

from tests.ascend.native import Report, json_of, report_of, twin_tests

# What the report has to say, by the name of the kernel in twin/bugs_*.cpp.
MESSAGES = {
    "capacity": "UB has 196608 bytes, of which 0 are taken: 196640 more do not fit",
    "too_many_buffers": "more than 64 buffers",
    "memory_of_the_other_core": "a vector core has no L1",
    "too_many_tensors": "more than 8 tensors of one position",
    "alloc_twice": "all 1 buffers of the queue are in use",
    "dequeue_empty": "the queue is empty",
    "enqueue_past_depth": "the queue is full, its depth is 1",
    "foreign_tensor": "the tensor is not from this queue",
    "free_twice": "is free, queued or out of date",
    "use_after_free": "is used after FreeTensor or EnQue",
    "use_after_enqueue": "is used after FreeTensor or EnQue",
    "never_freed": "was never freed",
    "never_dequeued": "was never taken from its queue",
    "partial_block": "1023 elements are not whole blocks of 32 bytes",
    "misaligned": "is not aligned to 32 bytes",
    "local_bounds": "needs elements 0 to 1025, but the tensor in buffer 1 of 1 of the queue",
    "global_bounds": "but SetGlobalBuffer gave 1016",
    "past_argument": "reaches from byte 32 to 4128 of x, which has 4096 bytes",
    "outside_arguments": "is outside of every argument",
    "write_input": "dst is in x, which is an input",
    "part_of_output": "byte 4064 of y was never written",
    "uninitialized": "was never written",
    "uninitialized_workspace": "src in workspace was never written",
    "mask": "a mask of 65 elements is not within 1 to 64",
    "repeat_stride": "dst has a repeat stride of 0",
    "overlap": "dst and a source overlap in part",
    "partial_repeat": "96 elements are not whole repeats of 256 bytes",
    "select_space": "Select needs the last 8192 bytes of UB",
    "rounding": "rounding mode 0 does not exist between these types",
    "gather_offset": "offset 6 is not that of an element of 4 bytes",
    "gather_in_place": "dst must not be src",
    "atomic_left_on": "atomic addition was never turned off",
    "tensor_offset": "is past the end of a tensor",
    "input_to_vector": "on pipe V while DataCopy",
    "vector_to_vector": "on pipe V while Adds",
    "output_to_vector": "is written on pipe V while DataCopy",
    "output_to_input": "src in workspace is read on pipe MTE2 while DataCopy",
    "wait_without_set": "event 0 was not set, the core would hang",
    "set_without_wait": "was set, but never waited for",
    "set_twice": "event 0 is set already",
    "event_out_of_range": "event 8 does not exist",
    "vector_to_output": "is read on pipe MTE3 while Duplicate",
    "vector_in_place": "is written on pipe V while Adds",
    "vector_to_scalar": "on pipe S while Duplicate",
    "scalar_to_vector": "on pipe V while LocalTensor::SetValue",
    "vector_to_input": "is written on pipe MTE2 while Adds",
    "output_to_output": "dst in y is written on pipe MTE3 while DataCopy",
    "events_exhausted": "no event identifier is free",
    "between_cores": "in workspace is",
    "same_output": "dst in y is written on pipe MTE3 while DataCopy",
    "deadlock": "flag 3 will never come",
    "flag_never_taken": "cross-core flag 3 came, but was never waited for",
    "flag_of_sync_all": "flag 12 is used by SyncAll",
    "cube_quant": "quantPre does not fit the type",
    "cube_source_stride": "srcStride has to be mSize rounded up to 16",
    "cube_transpose": "only elements of 2 bytes can be transposed",
    "cube_load_position": "dst is not in L0A or L0B",
    "cube_position": "operands have to be in L0A, L0B and L0C",
    "cube_hf32": "floats may be rounded to HF32",
    "cube_accumulate": "on pipe M while Mmad",
    "cube_alignment": "is not aligned to 512 bytes",
    "cube_sums_alignment": "is not aligned to 1024 bytes",
    "cube_exchange": "src in workspace",
    "cube_exchange_back": "flag 1 will never come",
}

# Faults of one instruction name the line; those of a whole launch, or of a line that is not there, cannot.
WITHOUT_LINE = {"capacity", "part_of_output", "atomic_left_on", "set_without_wait", "never_freed", "never_dequeued"}
WITHOUT_LINE |= {"flag_never_taken", "tensor_offset", "events_exhausted"}


def run(name: str, *, seeded: bool, strict: bool = True, dropped_sync: str = "") -> Report:
    return report_of(twin_tests().twin_bug, name.encode(), seeded, strict, dropped_sync.encode())


def test_every_seeded_bug_has_its_message():
    assert sorted(json_of(twin_tests().twin_bug_names)) == sorted(MESSAGES)


@pytest.mark.parametrize("name", MESSAGES)
def test_right_kernel_passes(name: str):
    assert run(name, seeded=False).errors == []


@pytest.mark.parametrize("name", MESSAGES)
def test_seeded_bug_is_caught(name: str):
    errors = run(name, seeded=True).errors
    matching = [e for e in errors if MESSAGES[name] in e]
    assert matching, errors
    assert matching[0].startswith(name)  # the kernel, and in most cases the core
    if name not in WITHOUT_LINE:
        assert ".cpp:" in matching[0] or "harness.h:" in matching[0]


def test_other_barriers_do_not_hide_a_missing_one():
    """Leaving out any one wait of the right kernel at run time is the same as not having written it."""
    right = run("input_to_vector", seeded=False)
    assert len(right.sync_sites) == 4
    for site in right.sync_sites:
        errors = run("input_to_vector", seeded=False, dropped_sync=site).errors
        assert any("is missing between them" in e for e in errors), site


def test_without_strict_order_of_vector_instructions_is_given():
    """As with the compiler's automatic synchronisation: order within V, and between S and the others."""
    for name in ("vector_to_vector", "vector_in_place", "vector_to_scalar", "scalar_to_vector"):
        assert run(name, seeded=True, strict=False).errors == []
    for name in ("input_to_vector", "vector_to_output", "output_to_input", "same_output"):
        assert run(name, seeded=True, strict=False).errors


def test_counters():
    counters = run("output_to_vector", seeded=False).counters
    assert counters["gm_written"] == 4096
    assert counters["gm_read"] == 0
    assert counters["vector_repeats"] == 2 * 4096 // 256
    assert counters["peak_UB"] == 4096
    assert counters["instructions_V"] == 2
    cube = run("cube_accumulate", seeded=False).counters
    assert cube["cube_flops"] == 2 * 2 * 16**3
    assert cube["l1_read"] == 2 * 2 * 512
    assert cube["peak_L0C"] == 2048
