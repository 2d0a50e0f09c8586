"""Megatron-LM, built on megatron-core, which is what the package on PyPI contains.

- `parsers`: a model's configuration, translated to Megatron's names.
- `options`: settings that exclude each other, or have no effect.
- `arguments`: Megatron's names, translated to the configuration classes of megatron-core.
- `runtime`: its process groups and seeds.
- `models`: GPT, BERT and T5 with this process's layers, and their batches and losses (`steps`, a file each).
- `optimizers`: its optimizer and scheduler, wrapped for a training loop.
- `data`: its datasets, and micro-batches.
- `schedule`: the model, wrapped for a training loop.
- `checkpoint`: its checkpoints inside those of save_state.
"""
