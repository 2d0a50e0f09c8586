"""The code of the README and the manual: every block is run here, or by the test that its mark names.

A block of Python without a mark is run by itself, on one process, with the names of its page (`SETUPS`).
Marks stand in the fence, behind the language:

    file="train.py" processes="2"       a program; the block of text after it is what it prints
    fragment="examples/train.py"        lines of a script that a test runs
    test="tests-integration/test_x.py"  the test that runs these commands or lines
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accel.accelerator import Accelerator
from accel.utils import ProjectConfiguration
from accel_launch.commands.launch import launch_command_parser
from accel_world.program import run_program

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[1]
FILES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/decisions").glob("*.md")),
]
PAGES = [str(path.relative_to(ROOT)) for path in FILES]
# Pages with a test of their own, which runs all blocks of these languages, and counts them.
OWN = {
    "docs/big-models.md": ("tests-integration/test_big_models_page.py", {"python"}),
    "docs/launch.md": ("tests-integration/test_launch_page.py", {"python", "sh"}),
    "docs/migrate.md": ("tests-integration/test_migrate_page.py", {"python", "sh"}),
    "docs/observability.md": ("tests-integration/test_observability_page.py", {"python"}),
}
FENCE = re.compile(r'```(?P<language>[a-z]+)(?P<marks>(?: [a-z]+="[^"]*")*)')
# As python starts a script.
ALONE = dict.fromkeys(["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])


class Block(NamedTuple):
    """A block of a page: the line of its fence, language, marks, text, and the text block after it."""

    line: int
    language: str
    marks: dict[str, str]
    text: str
    output: str | None


def blocks_of(page: str) -> list[Block]:
    """Read the blocks of a page.

    Raises:
        ValueError: If a fence is none that mkdocs reads, or is not closed.
    """
    lines, found, at = page.splitlines(), [], 0
    while at < len(lines):
        if not lines[at].startswith("```"):
            at += 1
            continue
        fence = FENCE.fullmatch(lines[at])
        if fence is None:
            raise ValueError(f'line {at + 1}: {lines[at]!r} is no fence; write ```language name="value"')
        try:
            end = lines.index("```", at + 1)
        except ValueError:
            raise ValueError(f"line {at + 1}: the block does not end") from None
        text = "".join(f"{line}\n" for line in lines[at + 1 : end])
        marks = dict(re.findall(r'([a-z]+)="([^"]*)"', fence["marks"]))
        if fence["language"] == "text" and found and not "".join(lines[found[-1][1] : at]).strip():
            found[-1][0] = found[-1][0]._replace(output=text)
        found.append([Block(at + 1, fence["language"], marks, text, None), end + 1])
        at = end + 1
    return [block for block, _ in found]


def indented(page: str) -> Iterator[int]:
    """Yield the numbers of lines that Markdown takes for code without a fence."""
    inside, before, in_list = False, "", False
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside and line.strip():
            if not line.startswith(" "):
                in_list = re.match(r"[-*] |\d+\. ", line) is not None
            elif line.startswith("    ") and not before.strip() and not in_list:
                yield number
        before = line


@functools.cache
def files_of_tests() -> dict[str, str]:
    """The text of each test file by its path."""
    folders = [ROOT / "tests-integration", ROOT / "tools/tests", *(ROOT / "packages").glob("*/tests")]
    found = [path for folder in folders for path in folder.rglob("test_*.py") if path != Path(__file__)]
    return {str(path.relative_to(ROOT)): path.read_text() for path in found}


def problems(page: str, text: str) -> Iterator[str]:
    """Yield what of a page's code no test runs."""
    for number in indented(text):
        yield f"line {number}: code without a fence, whose language and marks nothing can tell"
    for block in blocks_of(text):
        if block.language != "text" and (problem := _problem(page, block)):
            yield f"line {block.line}: {problem}"


def _problem(page: str, block: Block) -> str | None:
    shown = re.fullmatch(r"# all of (\S+)\n", block.text)
    if shown:
        name = Path(shown[1]).name
        # A package's metadata is used by whatever runs its module.
        name = "late_average" if name in ("pyproject.toml", "late_average.py") else name
        return (
            None if any(name in text for text in files_of_tests().values()) else f"no test names {shown[1]}"
        )
    if "fragment" in block.marks:
        return _strange_lines(block)
    if "test" in block.marks:
        there = block.marks["test"] in {*files_of_tests(), "tests-integration/test_manual_code.py"}
        return (_wrong_commands(block) or _unknown_calls(block)) if there else "its test is not there"
    here = {"python"} if page not in OWN else OWN[page][1]
    if block.language in here:
        return None
    return 'nothing runs it: mark the fence with test="..." or fragment="..."'


def _strange_lines(block: Block) -> str | None:
    path = block.marks["fragment"]
    if not any(Path(path).stem in text for text in files_of_tests().values()):
        return f"no test runs {path}"
    there = {line.strip() for line in (ROOT / path).read_text().splitlines()}
    strange = [line for line in block.text.splitlines() if line.strip() not in {*there, "", "..."}]
    return f"{path} has no line {strange[0].strip()!r}" if strange else None


def _wrong_commands(block: Block) -> str | None:
    """Whether a command of the launcher has flags that it does not have."""
    for line in block.text.splitlines():
        command = re.search(r"accel launch ((?:[^\";&|#]|\"[^\"]*\")+)", line)
        if command:
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    launch_command_parser().parse_args(shlex.split(command[1]))
            except SystemExit:
                return f"accel launch does not take {command[1]!r}"
    return None


def _unknown_calls(block: Block) -> str | None:
    """Whether code calls what the text of its test never names, so that it runs something else."""
    # A test of a page reads its blocks from there.
    own = {test for test, _ in OWN.values()} | {"tests-integration/test_manual_code.py"}
    if block.language != "python" or block.marks["test"] in own:
        return None
    called = {*re.findall(r"(\w+)\(", block.text)} - {"Accelerator"}
    strange = sorted(name for name in called if name not in files_of_tests()[block.marks["test"]])
    return f"{block.marks['test']} does not call {', '.join(strange)}" if strange else None


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_marked(page: str) -> None:
    assert list(problems(page, (ROOT / page).read_text())) == []


@pytest.mark.parametrize("page", OWN)
def test_the_pages_with_a_test_of_their_own_are_read_by_it(page: str) -> None:
    assert Path(page).name in files_of_tests()[OWN[page][0]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```sh\nls\n```\n", "nothing runs it"),
        ("```console\n$ ls\n```\n", "nothing runs it"),
        ("```yaml\na: 1\n```\n", "nothing runs it"),
        ("Text:\n\n    code = 1\n", "without a fence"),
        ('```sh test="tests-integration/test_none.py"\nls\n```\n', "is not there"),
        ('```sh test="tests-integration/test_ray.py"\naccel launch --no_such 1 a.py\n```\n', "not take"),
        ('```python test="tests-integration/test_ray.py"\nprepare_nothing()\n```\n', "does not call"),
        ('```python fragment="examples/five_lines.py"\nx = unknown()\n```\n', "has no line 'x = unknown()'"),
        ("```python\n# all of docs/unknown_script.py\n```\n", "no test names"),
    ],
)
def test_a_block_that_nothing_runs_is_noticed(text: str, problem: str) -> None:
    (found,) = problems("docs/page.md", text)
    assert problem in found


def test_a_fence_that_mkdocs_does_not_read_is_noticed() -> None:
    with pytest.raises(ValueError, match="is no fence"):
        blocks_of("```python file=a.py\n```\n")


# Names that a block of a page finds. They are made in the process that runs it.


def names() -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    data = DataLoader(TensorDataset(x, y), 4)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return {
        "torch": torch,
        "F": F,
        "nn": nn,
        "DataLoader": DataLoader,
        "Dataset": Dataset,
        "Accelerator": Accelerator,
        "ProjectConfiguration": ProjectConfiguration,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": data,
    }


def prepared(**options: Any) -> dict[str, Any]:
    found = names()
    accelerator = Accelerator(cpu=True, **options)
    order = ("model", "optimizer", "scheduler", "data")
    found |= zip(order, accelerator.prepare(*(found[name] for name in order)), strict=True)
    return found | {"accelerator": accelerator, "loader": found["data"]}


def for_quickstart() -> dict[str, Any]:
    found = prepared() | names()  # prepared by the block itself
    return found | {"load": list, "write_report": list}


class Progress:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def for_checkpoints() -> dict[str, Any]:
    project = ProjectConfiguration("before", automatic_checkpoint_naming=True)
    found = prepared(project_config=project)
    plain = names()
    return (
        found
        | {name: plain[name] for name in ("model", "optimizer", "scheduler")}
        | {
            "loader": plain["data"],
            "progress": Progress(),
        }
    )


def for_loading() -> dict[str, Any]:
    found = prepared(project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True))
    found["accelerator"].save_state()
    shutil.copytree("run/checkpoints/checkpoint_0", "run/step_100")
    found["accelerator"].save_model(found["model"], "run/weights")
    return found | {"MyModel": lambda: nn.Linear(4, 2)}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows with the names that the pages' batches have."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.arange(index, index + 4)
        return {
            "x": torch.ones(4) * index,
            "y": torch.tensor(index % 2),
            "input_ids": words,
            "labels": words,
            "attention_mask": torch.ones(4),
        }


def for_data() -> dict[str, Any]:
    found = prepared()
    loader = found["accelerator"].prepare(DataLoader(Rows(), 4))
    return found | {"loader": loader, "Dataset": Images}


class Images(Dataset[torch.Tensor]):
    """The rest of the page's dataset."""

    images = torch.zeros(6, 2, 2)

    def __len__(self) -> int:
        return 6

    def transform(self, image: torch.Tensor) -> torch.Tensor:
        return image + torch.rand(2, 2)


class Words(nn.Module):
    """A language model that says what its loss is, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 10)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **rest: Any) -> Any:
        logits = self.table(input_ids)
        if labels is None:
            return logits
        self.loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return self


def for_words() -> dict[str, Any]:
    found = names()
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    order = ("model", "optimizer", "scheduler", "data")
    objects = accelerator.prepare(model, optimizer, scheduler, DataLoader(Rows(), 2))
    batch = {name: item for name, item in next(iter(objects[-1])).items() if name not in "xy"}
    two = {"labelled": objects[-1], "unlabelled": accelerator.prepare(DataLoader(Rows(), 3))}
    found |= dict(zip(order, objects, strict=True)) | two
    return found | {"accelerator": accelerator, "batch": batch}


SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/checkpoints.md": for_checkpoints,
    "docs/data.md": for_data,
    "docs/engines.md": for_words,
    "docs/gradients.md": for_words,
    "docs/loading.md": for_loading,
    "docs/quickstart.md": for_quickstart,
}


def runnable(page: str) -> list[Block]:
    """The blocks of Python that are run here."""
    found = blocks_of((ROOT / page).read_text()) if page not in OWN else []
    return [
        block
        for block in found
        if block.language == "python"
        and not block.text.startswith("# all of ")
        and not {"test", "fragment"} & {*block.marks}
    ]


PROGRAMS = [(page, block) for page in PAGES for block in runnable(page) if "file" in block.marks]
FRAGMENTS = [(page, block) for page in PAGES for block in runnable(page) if "file" not in block.marks]


def place(item: Any) -> str:
    return item if isinstance(item, str) else f"line {item.line}"


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_fragment(page: str, text: str, folder: str) -> dict[str, Any]:
    """Run a block with the names of its page; returns the types of the names that it leaves."""
    with inside(folder):
        found = SETUPS.get(page, names)()
        exec(compile(text, page, "exec"), found)
        if issubclass(found["Dataset"], Images) and "Images" in found:
            loader = found["accelerator"].prepare(DataLoader(found["Images"](), 2, shuffle=True))
            assert len({image.sum().item() for batch in loader for image in batch}) == 6
        if "accelerator" in found:
            found["accelerator"].end_training()
        return {name: type(item).__name__ for name, item in found.items()}


def run_here(folder: str, *arguments: str) -> str:
    with inside(folder):
        return run_program(*arguments)


@pytest.mark.parametrize(("page", "block"), FRAGMENTS, ids=place)
def test_a_block_runs(world, tmp_path: Path, page: str, block: Block) -> None:
    world.run(run_fragment, page, block.text, str(tmp_path), size=1, init=False, env=ALONE, timeout_s=200)


@pytest.mark.parametrize(("page", "block"), PROGRAMS, ids=place)
def test_a_program_prints_what_the_page_says(world, tmp_path: Path, page: str, block: Block) -> None:
    (tmp_path / block.marks["file"]).write_text(block.text)
    size = int(block.marks.get("processes", 1))
    printed = world.run(
        run_here,
        *(str(tmp_path), block.marks["file"]),
        size=size,
        init=False,
        env=ALONE if size == 1 else {},
        timeout_s=200,
    )

    assert block.output is None or "".join(printed) == block.output


def test_the_first_resume_ends_as_the_whole_run(world, tmp_path: Path) -> None:
    (block,) = [block for page, block in PROGRAMS if page == "docs/quickstart.md"]

    def run(name: str, *arguments: str, size: int = 1) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "train.py").write_text(block.text)
        given = (str(tmp_path / name), "train.py", *arguments)
        env = ALONE if size == 1 else {}
        return "".join(world.run(run_here, *given, size=size, init=False, env=env, timeout_s=200))

    whole = run("whole")
    saved = [path.name for path in (tmp_path / "whole/run/checkpoints").iterdir()]
    assert sorted(saved) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert run("whole") == "resuming\n"  # all epochs are done
    (use,) = (
        block for block in blocks_of((ROOT / "docs/quickstart.md").read_text()) if "load_file" in block.text
    )
    (tmp_path / "whole" / "use.py").write_text(use.text)
    (used,) = world.run(run_here, str(tmp_path / "whole"), "use.py", size=1, init=False, env=ALONE)
    assert re.fullmatch(r"prediction: -?\d+\.\d{3}\n", used)
    assert run("stopped", "2") == ""
    assert len(re.findall(r"^epoch [123]: loss \d\.\d{6}$", whole, re.MULTILINE)) == 3
    assert run("stopped") == f"resuming\n{whole}"
    run("other", "2")
    assert run("other", size=2).startswith("resuming\nepoch 1: ")


def test_the_tests_that_the_page_on_contributing_shows_pass(world, launched, monkeypatch, tmp_path):
    fixtures, ran = {"world": world, "launched": launched}, 0
    for block in blocks_of((ROOT / "docs/contributing.md").read_text()):
        if block.language == "python":
            path = tmp_path / f"test_line_{block.line}.py"
            path.write_text(f"import torch\n\n\n{block.text}")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, path.stem, module)  # where its functions are looked for
            spec.loader.exec_module(module)
            (test,) = [item for name, item in vars(module).items() if name.startswith("test_")]
            test(**{name: fixtures[name] for name in inspect.signature(test).parameters})
            ran += 1
    assert ran == 2


# An engine, and the flags that request it.
ROWS = re.findall(
    r"^\| .* \| `(\S+(?: x \S+)?)`.* \| ((?:`--.*`)|none) \|$",
    (ROOT / "docs/which-engine.md").read_text(),
    re.MULTILINE,
)


def engine_of() -> str:
    accelerator = Accelerator(cpu=True)
    name = accelerator.engine.name
    accelerator.wait_for_everyone()  # gloo fails on a process that is still joining when another one ends
    accelerator.end_training()
    return str(name)


@pytest.mark.parametrize(("engine", "flags"), ROWS, ids=lambda text: text[:60])
def test_the_table_of_engines_requests_what_it_says(world, capfd, tmp_path, engine, flags) -> None:
    from accel_launch.cli import main

    script = tmp_path / "train.py"
    script.write_text("pass\n")
    arguments = " ".join(re.findall(r"`(.+?)`", flags)).split()
    assert main(["launch", "--dry_run", "--cpu", *arguments, str(script)]) in (0, None)
    exported = re.findall(r"^export (\w+)=(.*)$", capfd.readouterr().out, re.MULTILINE)
    variables = {name: "".join(shlex.split(value)) for name, value in exported}
    size = int(variables.get("WORLD_SIZE", 1))
    assert size == (4 if "--num_processes" in flags else 1)
    if engine == "deepspeed":  # its import takes seconds; test_deepspeed.py trains with it
        assert variables["ACCELERATE_USE_DEEPSPEED"] == "true"
        return
    own = {
        name: text for name, text in variables.items() if name.startswith(("ACCELERATE", "FSDP", "PARALLEL"))
    }
    found = world.run(engine_of, size=size, init=False, env=own | (ALONE if size == 1 else {}))
    assert {*found} == {engine}


def test_the_table_of_engines_is_read_in_full() -> None:
    assert len(ROWS) == 9


@pytest.mark.usefixtures("fresh_state")
def test_members_that_pages_name_are_there() -> None:
    accelerator = Accelerator(cpu=True)
    for page in PAGES:
        for name in re.findall(r"(?<![\w/.])accelerator\.([a-z]\w+)", (ROOT / page).read_text()):
            assert hasattr(accelerator, name) or name == "py", (page, name)
