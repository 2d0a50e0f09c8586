"""Inference with a model whose layers are spread over processes."""
