"""The examples of the README."""

from accel_world import readme

WINDOW, HALF = readme.examples(__file__)


def test_the_first_example_makes_three_steps(fresh_state):
    assert readme.num_lines(WINDOW) <= readme.MOST_LINES
    state = readme.run(WINDOW)["optimizer"].state
    assert {int(item["step"]) for item in state.values()} == {3}


def test_the_example_in_fp16_runs(fresh_state, capsys):
    readme.run(HALF)
    assert capsys.readouterr().out == "3 steps, learning rate 0.0125\n"
