"""The training loop: preparing, accumulating, gathering metrics, uneven inputs."""
