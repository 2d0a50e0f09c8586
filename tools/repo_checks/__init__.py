"""What the repository's checks share and are made of. Each check is a function that returns its problems.

- `tree`: the packages, their modules and what those import, read from the source.
- `layers`: imports and declared dependencies point downwards only.
- `declared`: what a package imports is declared in its pyproject.toml.
- `torch_free`: the launcher's modules can be imported without torch.
- `limits`: one file reads the environment; modules and functions stay short.
- `names`: docstrings of public names, and `__all__` where there is one.
- `documented`: the documented interface, and what is still missing of it.
- `signatures`: comparing a signature with a documented one.
"""
