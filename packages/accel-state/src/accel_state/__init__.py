"""Process state and hardware facts for distributed PyTorch: who am I, where do I run."""
