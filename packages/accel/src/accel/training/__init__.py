"""What a loop does every day: preparing, accumulating, gathering metrics, uneven inputs."""
