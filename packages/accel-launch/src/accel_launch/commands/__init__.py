"""The subcommands of `accel`, and what programs that start processes themselves want of `accel launch`."""
