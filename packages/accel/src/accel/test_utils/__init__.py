"""What test suites of programs on top of accelerate import from it."""
