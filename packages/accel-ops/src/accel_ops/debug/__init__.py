"""Debug mode: processes compare what they are about to do, and say where each is when one waits."""
