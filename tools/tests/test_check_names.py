"""The names check, on modules written for it."""

from __future__ import annotations

import sys
from importlib import import_module
from textwrap import dedent

import pytest

import check_names
from repo_checks.names import check_module, public_modules
from repo_checks.names import check_names as check
from repo_checks.tree import Module, packages

SOUND = '''
    """A module."""
    import os
    from typing import TYPE_CHECKING
    from os.path import join as join

    __all__ = ["LIMIT", "Thing", "join", "make"]
    LIMIT = 3

    class Thing:
        """A thing."""

        def act(self):
            """Act."""

        @property
        def size(self):
            """Its size."""

        def _inner(self): ...

    def make():
        """Make a thing."""

    def _helper(): ...
'''


@pytest.fixture
def problems_of(tmp_path, monkeypatch):
    """Check one module with the given source."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def run(source: str) -> list[str]:
        path = tmp_path / "accel_sample.py"
        path.write_text(dedent(source))
        return list(check_module(Module("accel_sample", path), import_module("accel_sample")))

    return run


def test_a_sound_module(problems_of):
    assert problems_of(SOUND) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"make"]', '"make", "more"]', "__all__ has more, and the module does not"),
        ('"make"]', '"make", "make"]', "__all__ repeats make"),
        ('"Thing", ', "", "Thing is public and not in __all__"),
        ('"join", ', "", "join is public and not in __all__"),
        ("def _helper", "def helper", "helper is public and not in __all__"),
        (
            '["LIMIT", "Thing", "join", "make"]',
            'sorted({"join", "make", "LIMIT", "Thing"})[::-1]',
            "computed",
        ),
        ('"""Make a thing."""', "...", "make has no docstring"),
        ('"""A thing."""', "", "Thing has no docstring"),
        ('"""Act."""', "...", "Thing.act has no docstring"),
        ('"""Its size."""', "...", "Thing.size has no docstring"),
    ],
)
def test_a_fault_is_named(problems_of, old, new, expected):
    problems = problems_of(SOUND.replace(old, new))
    assert len(problems) == 1
    assert expected in problems[0]


def test_a_module_of_re_exports_needs_no_list_of_them(problems_of):
    assert problems_of("from os.path import join as join\nfrom os.path import split as split") == []


ALONE = SOUND.replace("    from os.path import join as join\n", "").replace('"join", ', "")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", "__all__ repeats the public names; leave it out"),
        ('__all__ = ["LIMIT", "Thing", "make"]', "", None),
    ],
)
def test_own_names_alone_need_no_list(problems_of, old, new, expected):
    assert problems_of(ALONE.replace(old, new) if old else ALONE) == ([expected] if expected else [])


def test_the_generated_docstring_of_a_dataclass_does_not_count(problems_of):
    source = """
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
    """
    assert problems_of(source) == ["Point has no docstring"]


def test_a_method_may_have_its_base_docstring(problems_of):
    source = '''
        class Base:
            """Base."""
            def act(self):
                """Act."""
        class Derived(Base):
            """Derived."""
            def act(self): ...
    '''
    assert problems_of(source) == []


def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "accel_broken.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    problems = check([Module("accel_broken", tmp_path / "accel_broken.py")])
    assert problems == [
        f"{tmp_path / 'accel_broken.py'}: cannot be imported: No module named 'no_such_module'"
    ]


def test_private_modules_are_left_alone(tmp_path):
    source = tmp_path / "packages" / "accel-ops" / "src" / "accel_ops"
    source.mkdir(parents=True)
    for name in ("__init__", "__about__", "_inner", "tree"):
        (source / f"{name}.py").touch()
    names = [module.name for module in public_modules(packages(tmp_path))]
    assert names == ["accel_ops", "accel_ops.tree"]


def test_an_empty_folder_does_not_pass(tmp_path, capsys):
    assert check_names.main([str(tmp_path)]) == 1
    assert "no packages here" in capsys.readouterr().out
