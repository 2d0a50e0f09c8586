"""The interface check: what is missing, what differs, and a list that only shrinks."""

from __future__ import annotations

import json
import sys
from textwrap import dedent

import pytest

import check_interface
from repo_checks.documented import Entry, client_entries

SOURCE = '''
    import enum, abc

    def present(model, cpu=False): ...

    def stub(model):
        """Say."""
        raise NotImplementedError("stub is not there yet")

    def partly(model):
        if model:
            raise NotImplementedError("only without a model")

    class Kind(str, enum.Enum):
        NO = "no"

    class Base(abc.ABC):
        @abc.abstractmethod
        def act(self):
            raise NotImplementedError

    class Thing(Base):
        def __init__(self, size=1): ...
        @property
        def fixed(self): ...
        @property
        def open(self): ...
        @open.setter
        def open(self, value): ...
        @property
        def stubbed(self):
            raise NotImplementedError
        @staticmethod
        def static(model): ...
        def act(self): ...

    class Absent:
        def __init__(self):
            raise NotImplementedError
'''
MODULE = "accel_interface_sample"


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """Make the sample importable for one test."""
    (tmp_path / f"{MODULE}.py").write_text(dedent(SOURCE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def problems(*entries: Entry, listed: set[str] | None = None) -> list[str]:
    return [
        problem.removeprefix(f"{MODULE}.") for problem in check_interface.check(entries, listed or set())[0]
    ]


def entry(path: str, kind: str = "function", documented: str = "", bases: tuple[str, ...] = ()) -> Entry:
    return Entry(MODULE, tuple(path.split(".")), kind, documented, bases)


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize(
    "there",
    [
        entry("present", documented="(model, cpu: bool = False)"),
        entry("partly", documented="(model)"),
        entry("Kind", "enum"),
        entry("Kind.NO", "member", "no"),
        entry("Thing", "class", "(size: int = 1)", ("Base",)),
        entry("Thing.fixed", "property"),
        entry("Thing.open", "setting"),
        entry("Thing.static", "static method", "(model)"),
        entry("Thing.act", "method", "(self)"),
        entry("Base.act", "method", "(self)"),
    ],
    ids=lambda entry: entry.name,
)
def test_what_is_there(there):
    assert problems(there) == []


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize(
    "missing",
    [
        entry("nothing"),
        entry("Kind.YES", "member", "yes"),
        entry("Thing.other", "method"),
        Entry("accel_no_such_module", ("name",)),
    ],
    ids=lambda entry: entry.name,
)
def test_what_is_missing_must_be_listed(missing):
    assert check_interface.check([missing], set())[0] == [
        f"{missing.name}: documented, but neither exists nor is listed"
    ]
    assert check_interface.check([missing], {missing.name})[0] == []


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize(
    ("differing", "expected"),
    [
        (entry("present", documented="(model, cpu=True)"), "cpu defaults to False, documented True"),
        (entry("Kind.NO", "member", "none"), "is 'no', not 'none'"),
        (entry("Thing", "class", "(size: int = 2)"), "size defaults to 1, documented 2"),
        (entry("Thing", "class", "", ("KwargsHandler",)), "does not derive from KwargsHandler"),
        (entry("present", "class"), "documented as a class"),
        (entry("Thing.act", "property"), "is a method, documented as a property"),
        (entry("Thing.fixed", "setting"), "cannot be set"),
        (entry("Thing.act", "static method", "(self)"), "is not a static method"),
    ],
)
def test_a_difference_is_named(differing, expected):
    found = problems(differing)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize(
    "stub",
    [
        entry("stub", documented="(model)"),
        entry("Thing.stubbed", "property"),
        entry("Absent", "class", "()"),
    ],
    ids=lambda entry: entry.name,
)
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_stub_is_a_problem_listed_or_not(stub, is_listed):
    found, missing = check_interface.check([stub], {stub.name} if is_listed else set())

    assert f"{stub.name}: only raises NotImplementedError; take it out" in found
    assert missing == set()


@pytest.mark.usefixtures("sample")
def test_the_list_only_shrinks():
    assert problems(entry("present"), listed={f"{MODULE}.present"}) == [
        "present: exists now; run with --update"
    ]
    assert problems(listed={f"{MODULE}.invented"}) == ["invented: listed, but not a documented name"]


@pytest.mark.usefixtures("sample")
def test_update_takes_out_and_never_puts_in(tmp_path, capsys):
    facts = {"kind": "function", "signature": "(model, cpu=False)"}
    api = {MODULE: {"present": facts, "listed": facts, "unlisted": facts}}
    (tmp_path / "api.json").write_text(json.dumps(api))
    (tmp_path / "client-imports.txt").write_text("## UNION\n")
    path = tmp_path / "missing.txt"
    check_interface.write_list(path, {f"{MODULE}.present", f"{MODULE}.listed"})
    assert check_interface.main(["--update"], tmp_path) == 1
    assert check_interface.read_list(path) == {f"{MODULE}.listed"}
    assert f"{MODULE}.unlisted: documented, but neither exists nor is listed" in capsys.readouterr().out
    del api[MODULE]["unlisted"]
    (tmp_path / "api.json").write_text(json.dumps(api))
    assert check_interface.main([], tmp_path) == 0


def test_client_imports_become_names():
    text = """# heading

## UNION
(attribute use): accelerate.__version__, accelerate.hooks.CpuOffload
accelerate: <module>, Accelerator
accelerate.utils.constants: FSDP_AUTO_WRAP_POLICY

## diffusers
accelerate: cpu_offload
"""
    assert [entry.name for entry in client_entries(text)] == [
        "accel.__version__",
        "accel.hooks.CpuOffload",
        "accel",
        "accel.Accelerator",
        "accel.utils.constants.FSDP_AUTO_WRAP_POLICY",
    ]
