from __future__ import annotations

import argparse

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.settings.schema import SETTINGS


def parse(*tokens: str) -> argparse.Namespace:
    return launch_command_parser().parse_args(list(tokens))


def given(args: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}


def test_nothing_is_given_without_flags() -> None:
    args = parse("script.py")

    assert given(args) == {}
    assert (args.training_script, args.training_script_args) == ("script.py", [])


def test_underscores_and_hyphens_are_the_same() -> None:
    assert given(parse("--num-processes", "2", "s.py")) == given(parse("--num_processes=2", "s.py"))
    assert given(parse("--use-fsdp", "--fsdp-version=2", "s.py")) == {"use_fsdp": True, "fsdp_version": 2}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_flag_is_taken_in_both_spellings(name: str) -> None:
    setting = SETTINGS[name]
    default = setting.default
    sample = ["1"] if default in (None, ()) or isinstance(default, tuple) else [str(default)]
    if setting.spec.choices:
        sample = [str(setting.spec.choices[0])]
    tokens = [] if setting.switch else sample
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        args = parse(flag, *tokens, "script.py", "--other", name)
        assert getattr(args, name) is not None
        assert (args.training_script, args.training_script_args) == ("script.py", ["--other", name])


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(["--watch"], 120.0), (["--watch", "30"], 30.0), (["--watch=0.5"], 0.5), (["--watch", "1e2"], 100.0)],
)
def test_watch_may_stand_without_its_seconds(tokens: list[str], seconds: float) -> None:
    args = parse(*tokens, "script.py", "5")

    assert given(args) == {"watch": seconds}
    assert (args.training_script, args.training_script_args) == ("script.py", ["5"])


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_watch_takes_seconds_above_0(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--watch={text}", "script.py")
    assert f"--watch: {text!r} is not allowed; allowed: seconds, above 0." in capsys.readouterr().err


def test_what_follows_the_script_is_the_scripts_own() -> None:
    args = parse("--cpu", "s.py", "--cpu=false", "--num_proceses", "-h", "--", "-m")

    assert args.training_script_args == ["--cpu=false", "--num_proceses", "-h", "--", "-m"]
    assert given(args) == {"cpu": True}


def test_a_double_dash_ends_the_flags() -> None:
    args = parse("--cpu", "--", "--odd-name.py", "x")

    assert (args.training_script, args.training_script_args) == ("--odd-name.py", ["x"])


def test_a_switch_takes_false_after_an_equals_sign() -> None:
    assert given(parse("--cpu=false", "s.py")) == {"cpu": False}


def test_short_and_repeated_flags() -> None:
    assert given(parse("-m", "-q", "--vm", "a", "--vm", "b", "pkg.mod")) == {
        "module": True,
        "quiet": True,
        "vm": ["a", "b"],
    }


def test_a_value_may_start_with_a_dash() -> None:
    assert given(parse("--role", "-x-", "s.py")) == {"role": "-x-"}


@pytest.mark.parametrize(
    ("tokens", "messages"),
    [
        (("--num_proceses", "2", "s.py"), ("unknown flag --num_proceses", "--num_processes")),
        (("--mixed-precison=bf16", "s.py"), ("--mixed_precison", "--mixed_precision")),
        (("--mixed_precision", "fp17", "s.py"), ("'fp17'", "no, fp8, fp16, bf16")),
        (("--num_processes", "0", "s.py"), ("--num_processes", "'0'", "at least 1")),
        (("--num_processes",), ("--num_processes needs a value",)),
        (("--cpu=maybe", "s.py"), ("'maybe'", "true or false")),
    ],
)
def test_errors_name_the_value_and_the_fix(
    tokens: tuple[str, ...], messages: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*tokens)

    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert [message for message in messages if message not in error] == []
    assert len(error.splitlines()) == 1


def test_old_spellings_are_taken_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="use --mixed_precision fp16"):
        assert given(parse("--fp16", "s.py")) == {"mixed_precision": "fp16"}
    with pytest.warns(FutureWarning, match="--fsdp_backward_prefetch"):
        args = parse("--fsdp-backward-prefetch-policy", "BACKWARD_PRE", "s.py")
    assert given(args) == {"fsdp_backward_prefetch": "BACKWARD_PRE"}
    with pytest.warns(FutureWarning, match="--ipex has no effect"):
        assert given(parse("--ipex", "s.py")) == {}


def test_it_joins_the_subparsers_of_another_program() -> None:
    program = argparse.ArgumentParser()
    launch_command_parser(program.add_subparsers())

    args = program.parse_args(["launch", "--num-processes", "3", "s.py", "--cpu"])

    assert (args.num_processes, args.cpu, args.training_script_args) == (3, None, ["--cpu"])
    assert callable(args.func)


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")

    text = capsys.readouterr().out
    assert [name for name in SETTINGS if f"--{name}" not in text] == []
