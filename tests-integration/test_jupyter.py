"""notebook_launcher in a real Jupyter kernel: functions of cells run in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

# A kernel and torch in each of its processes start, and the machine may be busy.
pytestmark = pytest.mark.timeout(300)

TRAIN = """
import os
import torch
from accel import Accelerator, notebook_launcher

def train(steps, lr):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = torch.utils.data.DataLoader(torch.eye(4).repeat(4, 1), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    seen = 0
    for _ in range(steps):
        for batch in data:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            seen += len(accelerator.gather_for_metrics(batch))
    weights = model.module.weight if hasattr(model, "module") else model.weight
    return accelerator.num_processes, seen, os.getpid(), weights.detach()
"""


@pytest.fixture
def run_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def run(*cells: str) -> list[Any]:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        NotebookClient(notebook, timeout=240, kernel_name="python3").execute(cwd=str(tmp_path))
        return list(notebook.cells)

    return run


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_a_function_of_a_cell_trains_on_two_processes_twice(run_cells: Any) -> None:
    cells = run_cells(
        TRAIN,
        "size, seen, pid, weights = notebook_launcher(train, (2, 0.1), num_processes=2, use_port='0')\n"
        "print(size, seen, pid != os.getpid(), tuple(weights.shape))",
        "again = notebook_launcher(train, (2, 0.1), num_processes=2, use_port='0')\n"
        "print(torch.equal(weights, again[3]))",
        "print(sorted(n for n in os.environ if n in ('RANK', 'WORLD_SIZE', 'FORK_LAUNCHED')))",
    )

    assert printed(cells[1]).endswith("2 32 True (1, 4)\n")
    assert printed(cells[2]).endswith("True\n")
    assert printed(cells[3]) == "[]\n"


def test_the_failing_ranks_traceback_is_in_the_cell(run_cells: Any) -> None:
    with pytest.raises(CellExecutionError) as error:
        run_cells(
            "from accel import notebook_launcher\n"
            "import os\n"
            "def fail():\n"
            "    if os.environ['RANK'] == '1':\n"
            "        raise KeyError('planted in rank 1')\n",
            "notebook_launcher(fail, num_processes=2, use_port='0')",
        )

    assert "planted in rank 1" in str(error.value)
    assert "in fail" in str(error.value)


def test_an_accelerator_made_before_is_rejected_with_the_fix(run_cells: Any) -> None:
    with pytest.raises(CellExecutionError) as error:
        run_cells(
            "from accel import Accelerator, notebook_launcher\naccelerator = Accelerator(cpu=True)",
            "notebook_launcher(print, num_processes=2)",
        )

    assert "made in this process already. Restart the kernel" in str(error.value)


def test_one_process_is_the_kernel_itself(run_cells: Any) -> None:
    cells = run_cells(
        "import os\nfrom accel import notebook_launcher",
        "print(notebook_launcher(os.getpid, num_processes=1) == os.getpid())",
    )

    assert printed(cells[1]).endswith("True\n")
