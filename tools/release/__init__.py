"""What is published: built, looked into, installed alone, and compared with the repository."""
