"""The glossary's check, on planted words and terms."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

from repo_checks.names import public_modules
from repo_checks.tree import Module, packages
from repo_checks.words import (
    banned_words,
    check_local_words,
    check_terms,
    check_words,
    kept_local_names,
    kept_names,
)

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()

PLANTED = '''
    """A module."""
    class ShardOwn:
        """A class."""
        def fill_rows(self, given):
            """A method."""
        @staticmethod
        def _own(beside): ...
    def send(batch, *, told=False):
        """A function."""
    def _meet(): ...
'''

PLANTED_LOCALLY = """
    import os.path as beside
    from pathlib import Path
    class _Twin:
        def _fill(self, _given, *told, **said):
            self.held, found = Path().parts, self.own
            for anew in found:
                crew = {kin for kin in anew}
            try:
                send(part=crew, whole=beside)
            except OSError as meet:
                return lambda loose: meet
"""


def _glossary(*rows: str) -> str:
    head = ["# Glossary", "", "## Terms", "", "| a | b | c | d |", "| - | - | - | - |"]
    return "\n".join([*head, *rows, "", "## Next"])


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A module with banned words, which can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    path = tmp_path / "accel_planted_part.py"
    path.write_text(dedent(PLANTED))
    return Module("accel_planted_part", path)


def test_the_banned_words_are_those_of_the_second_table():
    words = banned_words(GLOSSARY)
    assert {"own", "holds", "parts", "beside", "told", "twin"} <= words
    assert not {"local", "shard", "pending", "word"} & words  # of the other column and of the heading


def test_public_names_with_banned_words_are_found(planted):
    problems = check_words([planted], banned_words(GLOSSARY))
    path = planted.path
    name = planted.name
    assert [problem.partition("; see")[0] for problem in problems] == [
        f"{path}: {name} has the word 'part'",
        f"{path}: {name}.ShardOwn has the word 'own'",
        f"{path}: {name}.ShardOwn.fill_rows has the word 'fill'",
        f"{path}: {name}.ShardOwn.fill_rows.given has the word 'given'",
        f"{path}: {name}.send.told has the word 'told'",
    ]


def test_all_names_that_a_module_defines_are_checked(tmp_path):
    """Not the names that it only uses: `Path.parts`, and keywords of functions of others."""
    path = tmp_path / "planted.py"
    path.write_text(dedent(PLANTED_LOCALLY))
    problems = check_local_words([Module("planted", path)], banned_words(GLOSSARY))
    assert [problem.partition(" has")[0] for problem in problems] == [
        f"{path}:{line}: {name}"
        for line, name in [
            (2, "beside"),
            (4, "_Twin"),
            (5, "_fill"),
            (5, "_given"),
            (5, "told"),
            (5, "said"),
            (6, "held"),
            (7, "anew"),
            (8, "crew"),
            (8, "kin"),
            (11, "meet"),
            (12, "loose"),
        ]
    ]


def test_each_kept_local_name_exists_and_has_a_banned_word():
    """A kept name that was renamed or removed must leave the list."""
    banned = banned_words(GLOSSARY)
    names = set()
    for package in packages(ROOT).values():
        for module in package.modules:
            found = check_local_words([module], banned, kept=())
            names |= {f"{module.name}.{text.split()[1]}" for text in found}
    assert names == kept_local_names()


def test_each_kept_name_exists_and_has_a_banned_word():
    """A kept name that was renamed or removed must leave the list."""
    modules = list(public_modules(packages(ROOT)))
    problems = check_words(modules, banned_words(GLOSSARY), kept=())
    names = {problem.partition(": ")[2].partition(" has the word")[0] for problem in problems}
    assert names == kept_names()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("| window | it | `accel_optim.window.Window` | |", None),
        ("| window | it | `accel_optim.window.Window.advance`, `docs/seam.md` | torch: window |", None),
        (
            "| field | a field without a default | `accel_state.train_plan.TrainPlan.mixed_precision` | |",
            None,
        ),
        (
            "| pane | it | `accel_optim.window.Pane` | |",
            "'pane' names accel_optim.window.Pane, which is not there",
        ),
        ("| wall | it | `accel_walls` | |", "'wall' names accel_walls, which is not there"),
        ("| page | it | `docs/no_such_page.md` | |", "'page' names docs/no_such_page.md, which is not there"),
        ("| air | it | nothing | |", "'air' names no class, function or file"),
        ("| window | it | `accel_optim.window.Window` |", "'window' has 3 columns instead of 4"),
        ("| window | `accel_optim.window.Window` |", "'window' has 2 columns instead of 4"),
    ],
)
def test_terms(row, problem):
    assert check_terms(_glossary(row), ROOT) == ([f"the glossary's {problem}"] if problem else [])


def test_the_glossary_is_sound():
    assert check_terms(GLOSSARY, ROOT) == []
