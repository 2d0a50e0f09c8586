"""The parts of the pytest plugin: a persistent world of workers, launched runs, leak checks.

- `messages`: what the test process and a worker say to each other.
- `functions`: naming a test function so that another process can find it.
- `worker`: the process that holds one rank.
- `pool`: the workers of one pytest process, and `World`, the fixture's value.
- `report`: what a failed run looks like to a reader.
- `launched`: a script run under a real launcher.
- `leaks`: what a test must leave as it found it.
- `ports`: TCP ports that no other test on this machine has.
"""
