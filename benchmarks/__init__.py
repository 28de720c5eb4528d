"""Speed of the fused operators against the best that PyTorch and transformers offer for the same work.

`python -m benchmarks.table` measures and prints a table, `python -m pytest benchmarks --benchmark-only` runs the same
cases under pytest-benchmark. An operator is one file in `benchmarks/operators`, which yields its cases.
"""
