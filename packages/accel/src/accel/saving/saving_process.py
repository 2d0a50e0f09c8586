"""Which processes save: all, or only the main one, as under `if accelerator.is_main_process:`."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING

from accel_ops.collectives.store_barrier import store_barrier
from accel_state.logging.warning import is_framework_frame, user_frame, warn

if TYPE_CHECKING:
    from accel.training.run import Run
    from accel_state.process.info import ProcessInfo

PATIENCE_S = 30.0
"""The seconds after which the main process warns that it waits for the other ranks."""

_MAIN = ("is_main_process", "is_local_main_process")


def saving_process(run: Run, what: str, main_process_only: bool | None) -> ProcessInfo | None:
    """Determine which processes save. Every caller of `save_state` or `save_model` calls this.

    All processes save, however late one comes, unless an argument or the surrounding code says that only the
    main process calls it. That is possible with replicas; engines without a full model on one process need
    all.

    Args:
        run: The run to save.
        what: The method, for messages.
        main_process_only: Whether only the main process calls it; None to decide by the surrounding code.

    Returns:
        This process, if all processes save; the main process with world size 1, if it saves alone; None on
        another process in that case.

    Raises:
        ValueError: If the engine needs all processes, or a process other than the main one sets
            main_process_only.
        RuntimeError: If a process does not call it within the timeout of a collective.
    """
    process = run.process
    if process.world_size == 1:
        return process
    if run.engine.traits.saves_collectively:
        if main_process_only:
            raise ValueError(
                f"{what}(main_process_only=True): the {run.engine.name} engine saves on all processes. Call "
                "it on every process, without main_process_only."
            )
        return process
    in_main_only_code = main_process_only is None and _is_for_main_only(user_frame(), what)
    if not (main_process_only or in_main_only_code):
        store_barrier(process, what, PATIENCE_S, lambda missing: _warn_of_delay(what, missing))
        return process
    if process.is_main:
        if in_main_only_code and what == "save_state":
            warn(
                "save_state is called on the main process alone: the checkpoint lacks the random generators "
                "of the other ranks, so training with dropout does not resume exactly. Call it on every "
                "process; or confirm this with save_state(main_process_only=True)."
            )
        return replace(process, world_size=1, local_world_size=1)
    if main_process_only:
        raise ValueError(
            f"{what}(main_process_only=True) is called on process {process.rank}. Call it under `if "
            "accelerator.is_main_process:`, or omit main_process_only."
        )
    warn(
        f"process {process.rank} calls {what} where the main process saves alone, and saves nothing. Call it "
        "outside of `if accelerator.is_main_process:`, or pass main_process_only=False.",
        about="process",
    )
    return None


def _warn_of_delay(what: str, missing: list[int]) -> None:
    warn(
        f"the main process has waited for {PATIENCE_S:g} s in {what}, and these processes have not called "
        f"it: {', '.join(map(str, missing))}. It keeps waiting. If only the main process calls it, pass "
        "main_process_only=True; else call it on every process."
    )


def _is_for_main_only(frame: FrameType | None, what: str) -> bool:
    """Whether a call, or one of its callers, is in code that only the main process runs."""
    while frame is not None:
        if not is_framework_frame(frame):
            lines = _main_only_lines(frame.f_code.co_filename, what)
            if any(frame.f_lineno in found for found in lines):
                return True
            what = frame.f_code.co_name  # the function that the next frame calls
        frame = frame.f_back
    return False


@cache
def _main_only_lines(filename: str, what: str) -> tuple[range, ...]:
    """Return the lines of a source file that only the main process reaches."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):  # not Python, such as a shell's input
        return ()
    return tuple(
        range(block[0].lineno, (block[-1].end_lineno or 0) + 1)
        for node in ast.walk(tree)
        for block in _main_only_blocks(node, what)
        if block
    )


def _main_only_blocks(node: ast.AST, what: str) -> Iterator[list[ast.stmt]]:
    if isinstance(node, ast.If):
        yes, no = (node.body, node.orelse) if not _is_negated(node.test) else (node.orelse, node.body)
        # If the other branch saves too, all processes save.
        all_ranks_save = any(_named(inner) == what for item in no for inner in ast.walk(item))
        if _is_main_condition(node.test) and not all_ranks_save:
            yield yes
    for name in ("body", "orelse", "finalbody"):
        found = getattr(node, name, None)
        block: list[ast.stmt] = found if isinstance(found, list) else []
        for place, item in enumerate(block):
            if _is_guard(item):
                yield block[place + 1 :]
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else ()
    if any(_named(item) in ("on_main_process", "on_local_main_process") for item in decorators):
        yield node.body  # type: ignore[attr-defined]


def _is_guard(item: ast.AST) -> bool:
    """Whether a statement is `if not accelerator.is_main_process: return`."""
    return (
        isinstance(item, ast.If)
        and _is_negated(item.test)
        and _is_main_condition(item.test)
        and isinstance(item.body[-1], ast.Return | ast.Continue | ast.Raise)
    )


def _is_negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _is_main_condition(test: ast.expr) -> bool:
    """Whether a condition holds on the main process alone; or, negated, on all others."""
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and _named(test.operand) in _MAIN
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_is_main_condition(value) and not _is_negated(value) for value in test.values)
    if isinstance(test, ast.BoolOp):
        # "is_main_process or distributed_type == DEEPSPEED": under that engine all save in any case.
        return _is_main_condition(test.values[0]) and all(
            any(_named(inner) == "distributed_type" for inner in ast.walk(value)) for value in test.values[1:]
        )
    return _named(test) in _MAIN


def _named(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
