"""The guard: checks losses and gradients, and makes all processes react in the same way."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch

from accel.observe.guard.bundle import Bundle, display_path, write
from accel.observe.guard.errors import GuardError
from accel.observe.guard.gradients import BackwardOrder, Measured, measure, parameter_names
from accel.observe.guard.record import WindowRecorder
from accel.observe.guard.report import Finding, Spikes, describe
from accel_ops.collectives import operations
from accel_ops.collectives.objects import gather_object
from accel_optim.lomo import steps_in_backward
from accel_optim.optimizer import AcceleratedOptimizer
from accel_state.logging.warning import warn
from accel_state.step_events import Observer, subscribe, unsubscribe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.training.run import Run

_MOST_WARNINGS = 10  # for bad steps in a row; after these every hundredth warns


class _Settings(Protocol):
    """Those of GuardKwargs, which makes the guard."""

    action: str | None
    bundle: str | os.PathLike[str] | None
    max_bundles: int
    spike: float | None
    spike_window: int
    check_gradients: bool


class Guard(Observer):
    """Checks the losses and gradients of a run.

    Args:
        run: The run.
        settings: What to look for, and what to do.
    """

    def __init__(self, run: Run, settings: _Settings) -> None:
        self._run, self._settings = run, settings
        self._losses: list[torch.Tensor] = []
        self._checked: set[int] = (
            set()
        )  # ids of the optimizers that have stepped since the last backward pass
        self._measured: dict[int, Measured] = {}  # by the id of the optimizer
        self._order = BackwardOrder()
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._spikes: WeakKeyDictionary[Any, Spikes] = WeakKeyDictionary()
        self._bad_steps_in_a_row = self._skipped = self._written = 0
        self._has_warned_no_optimizer = False
        self._recorder = WindowRecorder(run) if settings.bundle is not None else None
        if self._recorder is not None:
            subscribe(run.gradient_state, self._recorder)

    def model_prepared(self, model: torch.nn.Module) -> None:
        """Record the order of its parameters in backward."""
        if self._settings.check_gradients and not self._run.engine.traits.shards_gradients:
            self._order.record(model)
        if self._recorder is not None:
            self._recorder.model_prepared(model)

    def loader_prepared(self, loader: Any) -> None:
        """Keep its batches for bundles."""
        if self._recorder is not None:
            self._recorder.loader_prepared(loader)

    def optimizer_prepared(self, optimizer: Any) -> None:
        """Warn if its gradients or steps cannot be checked."""
        if self._settings.check_gradients and type(optimizer) is not AcceleratedOptimizer:
            warn(
                f"GuardKwargs looks at losses alone under {self._run.engine.name}, which keeps gradients to "
                "itself. Pass check_gradients=False to say so yourself."
            )
        if steps_in_backward(optimizer):
            name = type(getattr(optimizer, "optimizer", optimizer)).__name__
            warn(f"GuardKwargs does not look at the steps of {name}, which steps in backward.")

    def stop(self) -> None:
        """Stop observing, and remove hooks."""
        unsubscribe(self._run.gradient_state, self)
        self._order.end()
        if self._recorder is not None:
            unsubscribe(self._run.gradient_state, self._recorder)
            self._recorder.stop()

    def before_backward(self, loss: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Keep the loss for the check of the step."""
        if not self._run.prepared.optimizers:  # nothing would end the window, whose batches are kept
            self._warn_no_optimizer()
            return
        begins = bool(self._checked)
        self._checked.clear()
        if begins:
            self._losses.clear()
        if self._recorder is not None:
            self._recorder.record_loss(loss, begins)
        run, value = self._run, loss.detach()
        # A window's mean losses come divided, unless backward starts from a gradient that is.
        steps = run.gradient_state.num_steps if run.window.has_means and gradient is None else 1
        value = value if value.dim() == 0 else value.mean()
        self._losses.append(value if steps == 1 else value * steps)

    def _warn_no_optimizer(self) -> None:
        if not self._has_warned_no_optimizer:
            self._has_warned_no_optimizer = True
            warn(
                "GuardKwargs looks at the steps of prepared optimizers, and none is prepared. Pass the "
                "optimizer to accelerator.prepare()."
            )

    def gradients_ready(self) -> None:
        """Measure the gradients of the window."""
        self._order.end()
        if self._settings.check_gradients:
            optimizers = [
                item for item in self._run.prepared.optimizers if type(item) is AcceleratedOptimizer
            ]
            self._measured = {id(item): measure(item.param_groups) for item in optimizers}

    def before_step(self, optimizer: Any) -> bool:
        """Check a step: warn if something is wrong, or raise; returns whether to skip it."""
        if steps_in_backward(optimizer):  # it has stepped
            return False
        # A second step without a backward pass has nothing new to check.
        if id(optimizer) in self._checked:
            return False
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        found = self._check(optimizer)
        self._checked.add(id(optimizer))
        if found is None:
            self._bad_steps_in_a_row = 0
            return False
        message, bundle = found
        self._bad_steps_in_a_row += 1
        count, action = self._bad_steps_in_a_row, self._settings.action
        if action == "stop":
            raise GuardError(f"{message} GuardKwargs(action='stop') ends the run.{bundle}")
        if action == "skip":
            self._skipped += 1
            message += f" All processes skip the step ({self._skipped} so far)."
        if count <= _MOST_WARNINGS or count % 100 == 0:
            row = f" It is number {count} in a row." if count > 1 else ""
            warn(message + row + bundle)
        return action == "skip"

    def after_step(self, optimizer: Any) -> None:
        """End the window: a closure may have computed other losses in the step since it was checked."""
        self._checked.add(id(optimizer))

    def _check(self, optimizer: Any) -> tuple[str, str] | None:
        """Return a message about a step and one about its bundle; None if nothing is wrong on any process."""
        process = self._run.process
        measured = self._measured.get(id(optimizer), Measured())
        facts = self._facts(measured)[None]
        # A process that has run out of data calls no collectives: each one checks by itself.
        joining = self._run.engine.data_parallel.uneven_inputs
        on_all_ranks = process.world_size > 1 and not (joining is not None and joining.active)
        table = (operations.gather(facts, process=process) if on_all_ranks else facts).tolist()
        spikes = self._spikes_of(optimizer)
        is_spike = [False] * len(table) if spikes is None else spikes.find([mean for _, _, mean in table])
        has_bad_loss = any(bad_loss for bad_loss, _, _ in table)
        has_bad_gradient = any(bad_gradient for _, bad_gradient, _ in table)
        if not (has_bad_loss or has_bad_gradient or any(is_spike)):
            return None
        scale = self._scale() if has_bad_gradient and not has_bad_loss else None
        if scale is not None and scale > 1 and not any(is_spike):
            return None  # an overflow: the scaler skips this step, and lowers the scale
        finding = self._find(measured, is_spike[process.rank if on_all_ranks else 0])
        findings = gather_object([finding], process=process) if on_all_ranks else [finding]
        message = describe(self._steps[optimizer], findings, spikes, scale)
        if self._recorder is None or self._written >= self._settings.max_bundles:
            return message, ""
        return message, self._bundle(Bundle(self._steps[optimizer], message, _ranks(findings)), on_all_ranks)

    def _bundle(self, about: Bundle, on_all_ranks: bool) -> str:
        """Write a bundle; returns a sentence about it."""
        assert self._recorder is not None, "checked before"
        assert self._settings.bundle is not None, "there is a recorder"
        if self._run.process.world_size > 1 and not on_all_ranks:
            return " No bundle is written inside join_uneven_inputs, where processes may be out of data."
        try:
            folder = write(self._run, self._settings.bundle, about, self._recorder)
        except Exception as error:  # a disk that is full must not end the training
            return f" No bundle could be written ({type(error).__name__}: {error})."
        self._written += 1
        return f" To recompute it: accel replay {display_path(folder)}"

    def _facts(self, measured: Measured) -> torch.Tensor:
        """Whether a loss is not finite, whether a gradient is not, and the mean loss (NaN without any)."""
        device = self._run.process.device
        bad_loss = torch.zeros((), device=device)
        bad_gradient = torch.full((), float(bool(measured.broken)), device=device)
        mean = torch.full((), math.nan, device=device)
        if self._losses:
            losses = [loss.to(device, non_blocking=True) for loss in self._losses]
            bad_loss = (~torch.stack([torch.isfinite(loss) for loss in losses]).all()).float()
            mean = torch.stack([loss.float() for loss in losses]).mean()
        return torch.stack([bad_loss, bad_gradient, mean])

    def _spikes_of(self, optimizer: Any) -> Spikes | None:
        factor = self._settings.spike
        if factor is None:
            return None
        # Optimizers that step in turn have different losses.
        return self._spikes.setdefault(optimizer, Spikes(factor, self._settings.spike_window))

    def _scale(self) -> float | None:
        scaler = self._run.scaler
        return scaler.get_scale() if scaler is not None and scaler.is_enabled() else None

    def _find(self, measured: Measured, is_spike: bool) -> Finding:
        """This process's findings about a step that is wrong; waits for the device."""
        names = parameter_names(self._run)
        parameters = []
        for parameter in measured.broken:
            name, index = names[id(parameter)]
            parameters.append((self._order.place(parameter, index), name))
        losses = tuple(float(loss) for loss in self._losses)
        return Finding(self._run.process.rank, losses, is_spike, tuple(parameters), measured.count)


def _ranks(findings: Sequence[Finding]) -> tuple[int, ...]:
    """Return the ranks whose windows are useful: those with a bad loss, else all."""
    bad = tuple(finding.rank for finding in findings if finding.is_bad)
    return bad or tuple(finding.rank for finding in findings)
