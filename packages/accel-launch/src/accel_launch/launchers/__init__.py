"""Starting through programs of others: torchrun, MPI, DeepSpeed, Slurm."""
