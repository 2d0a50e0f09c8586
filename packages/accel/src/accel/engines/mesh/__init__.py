"""FSDP2, HSDP, tensor and context parallelism over one device mesh."""
