"""Models and optimizers in parts: folders of torch.distributed.checkpoint (DCP)."""
