"""Megatron-LM, built on megatron-core, which is what its package on the index has.

- `parsers`: what a model's configuration means in Megatron's names.
- `options`: settings that exclude each other, or that nothing would read.
- `arguments`: Megatron's names as the configuration classes of megatron-core.
- `runtime`: its process groups and seeds.
- `models`: GPT, BERT and T5 of this process's layers, with their batches and losses (`steps`, a file each).
- `optimizers`: its optimizer and schedule behind those of a training loop.
- `data`: its datasets, and micro-batches.
- `schedule`: the model as a training loop calls it.
- `checkpoint`: its checkpoints inside those of save_state.
"""
