"""The parts of the pytest plugin: a persistent world of workers, launched runs, leak checks.

- `messages`: what the test process and a worker say to each other.
- `functions`: naming a test function so that another process can find it.
- `starter`: the process that imports torch once and forks the workers.
- `worker`: the process of one rank.
- `process`: the starter and the workers as the test process sees them.
- `environment`: the environment that the processes of a test start from.
- `pool`: the workers of one pytest process, and `World`, the fixture's value.
- `report`: what a failed run looks like to a reader.
- `exchange`: runs one call on several workers.
- `program`: runs a script as one rank of a world.
- `launched`: a script run under a real launcher.
- `marked`: the processes of one launched run.
- `guard`: the end of launched runs whose pytest process was killed.
- `leaks`: what a test must leave as it found it.
- `ports`: TCP ports that no other test on this machine has.
- `engine_cases`: the engines that contracts are tested on, as a script requests them.
"""
