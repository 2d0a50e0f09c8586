"""Code that the engines that shard models share: FSDP in both versions, and the mesh."""
