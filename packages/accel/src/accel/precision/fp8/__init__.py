"""fp8 training: the recipes of three libraries, and what each does to a model.

- `recipes`: the settings.
- `choice`: which library, from arguments, environment and what is installed.
- `ao`: torchao. Runs on CPU and GPU; linear layers are replaced, with the same parameters.
- `te`: Transformer Engine. Layers are replaced, and forward runs in its autocast.
- `msamp`: MS-AMP, which wraps a model together with its optimizer.
"""
