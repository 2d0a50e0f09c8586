"""What the engines share that shard models: FSDP in both versions, and the mesh."""
