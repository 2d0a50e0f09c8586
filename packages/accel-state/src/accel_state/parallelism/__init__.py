"""How the processes of a run are arranged, and the settings of each kind of parallelism."""
