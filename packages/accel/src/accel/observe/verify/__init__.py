"""`accel verify`: recording runs, and comparing the records."""
