"""The steps that make a model parallel over a device mesh, one file each; `engines/mesh.py` orders them."""
