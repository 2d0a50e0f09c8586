"""The settings of a launch: what they are, and where each value comes from."""
