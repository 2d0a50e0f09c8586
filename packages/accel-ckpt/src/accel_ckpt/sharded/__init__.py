"""Sharded models and optimizers: folders of torch.distributed.checkpoint (DCP)."""
