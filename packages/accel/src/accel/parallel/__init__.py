"""The steps that make a model parallel over a device mesh; `engines/mesh_plan.py` orders them."""
