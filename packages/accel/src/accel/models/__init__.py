"""What is done to a model under any engine."""
