"""Random training programs, run on plain PyTorch and under each engine, and compared.

- `program`: what a program is, and hypothesis' strategy that makes random ones.
- `model`: the small models.
- `engines`: the engines, as a script requests them.
- `trace`: what a run shows of itself, and how two runs are compared.
- `follow`: the loop that follows a program, the same on both sides.
- `plain`: a program on plain PyTorch, in one process.
- `accelerated`: the same program through accel's documented interface, as one rank.
- `check`: one program on plain PyTorch and under an engine; what differs.

`tools/try_programs.py` tries many of them, for minutes.
"""
