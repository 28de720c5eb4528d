"""Context parallelism: the ranks of a group hold parts of the same sequences, and attend to all of them.

`sharder` cuts micro-batches, `layout` says what a rank then holds, `ulysses` and `ring` exchange heads or keys and
values, `attention` puts both behind transformers' attention interface, `apply` prepares and checks a model.
"""
