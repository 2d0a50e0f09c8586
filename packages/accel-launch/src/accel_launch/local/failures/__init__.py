"""What is said when a run fails."""
