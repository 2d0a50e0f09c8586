"""What is published: built, inspected, installed alone, and compared with the repository."""
