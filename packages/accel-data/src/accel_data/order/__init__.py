"""Which sample each process gets at each step."""
