"""The guard: follows losses and gradients, and has all processes do the same about what is wrong."""

from __future__ import annotations

import math
import os
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch

from accel.observe.attach import Undo, put
from accel.observe.guard.bundle import Bundle, shown, write
from accel.observe.guard.errors import GuardError
from accel.observe.guard.gradients import BackwardOrder, Measured, measure, parameter_names
from accel.observe.guard.record import WindowRecorder
from accel.observe.guard.report import Finding, Spikes, describe
from accel.observe.observer import Observer
from accel_ops.collectives import operations
from accel_ops.collectives.objects import gather_object
from accel_optim.lomo import steps_in_backward
from accel_optim.optimizer import AcceleratedOptimizer
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.training.run import Run

_ROW = 10  # warnings of steps in a row that are wrong; from there on every hundredth warns


class _Settings(Protocol):
    """Those of GuardKwargs, which makes the guard."""

    action: str | None
    bundle: str | os.PathLike[str] | None
    max_bundles: int
    spike: float | None
    spike_window: int
    check_gradients: bool


class _StepSkipped(Exception):  # no error: leaves the step of an optimizer that has called a closure
    pass


class Guard(Observer):
    """Looks at the losses and gradients of a run.

    Args:
        run: The run.
        settings: What to look for, and what to do.
    """

    def __init__(self, run: Run, settings: _Settings) -> None:
        self._run, self._settings = run, settings
        self._losses: list[torch.Tensor] = []
        self._judged: set[int] = set()  # the ids of optimizers that have stepped since the last backward pass
        self._measured: dict[int, Measured] = {}  # by the id of the optimizer
        self._has_new = False
        self._order = BackwardOrder()
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._spikes: WeakKeyDictionary[Any, Spikes] = WeakKeyDictionary()
        self._row = self._skipped = self._written = 0
        self._has_told_of_none = False
        self._recorder = WindowRecorder(run) if settings.bundle is not None else None
        engine, sync = run.engine, run.engine.gradient_sync
        self._undo: list[Undo] = [
            put(engine, "backward", partial(self._backward, engine.backward)),
            # Where gradients are whole and reduced, and neither clipped nor unscaled yet.
            put(sync, "finish_window", partial(self._finish_window, sync.finish_window)),
            partial(delattr, sync, "is_active"),
        ]
        sync.is_active = True  # on one process finish_window would not be called

    def model_prepared(self, model: torch.nn.Module) -> None:
        """Note the order of its parameters in backward."""
        if self._settings.check_gradients and not self._run.engine.gradients.are_sharded:
            self._order.note(model)
        if self._recorder is not None:
            self._recorder.model_prepared(model)

    def loader_prepared(self, loader: Any) -> None:
        """Keep its batches for bundles."""
        if self._recorder is not None:
            self._recorder.loader_prepared(loader)

    def optimizer_prepared(self, optimizer: Any) -> None:
        """Judge each of its steps."""
        if self._settings.check_gradients and type(optimizer) is not AcceleratedOptimizer:
            warn(
                f"GuardKwargs looks at losses alone under {self._run.engine.name}, which keeps gradients to "
                "itself. Pass check_gradients=False to say so yourself."
            )
        if steps_in_backward(optimizer):
            name = type(getattr(optimizer, "optimizer", optimizer)).__name__
            warn(f"GuardKwargs does not look at the steps of {name}, which steps in backward.")
        plain = optimizer.step

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return self._step(plain, optimizer, *args, **kwargs)

        # A method of a function, as torch's schedulers wrap `step.__func__`.
        self._undo.append(put(optimizer, "step", MethodType(step, optimizer)))

    def stop(self) -> None:
        """Take off what was attached."""
        self._order.end()
        while self._undo:
            self._undo.pop()()
        if self._recorder is not None:
            self._recorder.stop()

    def _backward(self, plain: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
        if not self._run.optimizers:  # nothing would end the window, whose batches are kept
            self._tell_of_none()
            plain(loss, **kwargs)
            return
        begins = bool(self._judged)
        self._judged.clear()
        if begins:
            self._losses.clear()
        if self._recorder is not None:
            self._recorder.note_loss(loss, begins)
        run, seen = self._run, loss.detach()
        # A window's mean losses come divided, unless backward starts from a gradient that is.
        steps = run.gradient_state.num_steps if run.window.has_means and "gradient" not in kwargs else 1
        seen = seen if seen.dim() == 0 else seen.mean()
        self._losses.append(seen if steps == 1 else seen * steps)
        plain(loss, **kwargs)
        self._has_new = True

    def _tell_of_none(self) -> None:
        if not self._has_told_of_none:
            self._has_told_of_none = True
            warn(
                "GuardKwargs looks at the steps of prepared optimizers, and none is prepared. Pass the "
                "optimizer to accelerator.prepare()."
            )

    def _finish_window(self, plain: Callable[[], None]) -> None:
        plain()
        if self._has_new and self._run.gradient_state.sync_gradients:
            self._has_new = False
            self._order.end()
            if self._settings.check_gradients:
                own = [item for item in self._run.optimizers if type(item) is AcceleratedOptimizer]
                self._measured = {id(item): measure(item.param_groups) for item in own}

    def _step(
        self, plain: Callable[..., Any], optimizer: Any, closure: Callable[[], Any] | None = None
    ) -> Any:
        if not self._run.gradient_state.sync_gradients:
            return plain() if closure is None else plain(closure)
        if closure is not None:
            return self._step_by(closure, plain, optimizer)
        # A second step without a backward pass has nothing new to judge.
        if id(optimizer) not in self._judged and self._is_to_skip(optimizer):
            optimizer.skip_step()
            return None
        return plain()

    def _step_by(self, closure: Callable[[], Any], plain: Callable[..., Any], optimizer: Any) -> Any:
        """Step an optimizer whose closure calls backward: judged once it has, before a parameter changes."""
        is_first = True

        def judged() -> Any:
            nonlocal is_first
            loss = closure()
            # Not again within the step: a line search tries weights that it does not keep.
            if is_first and self._is_to_skip(optimizer):
                raise _StepSkipped
            is_first = False
            return loss

        try:
            return plain(judged)
        except _StepSkipped:
            optimizer.skip_step()
            return None
        finally:
            self._judged.add(id(optimizer))  # the next step's losses are its own

    def _is_to_skip(self, optimizer: Any) -> bool:
        """Judge a step: warn of what is wrong, or raise; returns whether to skip it."""
        self._run.engine.gradient_sync.finish_window()
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        found = self._judge(optimizer)
        self._judged.add(id(optimizer))
        if found is None:
            self._row = 0
            return False
        message, bundle = found
        self._row += 1
        action = self._settings.action
        if action == "stop":
            raise GuardError(f"{message} GuardKwargs(action='stop') ends the run.{bundle}")
        if action == "skip":
            self._skipped += 1
            message += f" All processes skip the step ({self._skipped} so far)."
        if self._row <= _ROW or self._row % 100 == 0:
            row = f" It is number {self._row} in a row." if self._row > 1 else ""
            warn(message + row + bundle)
        return action == "skip"

    def _judge(self, optimizer: Any) -> tuple[str, str] | None:
        """A message about a step and one about its bundle; None if nothing is wrong on any process."""
        process = self._run.process
        measured = self._measured.get(id(optimizer), Measured())
        facts = self._facts(measured)[None]
        # A process that is out of data takes no part in collectives: each judges by itself.
        joining = self._run.engine.loaders.join_state
        together = process.world_size > 1 and not (joining is not None and joining.active)
        table = (operations.gather(facts, process=process) if together else facts).tolist()
        spikes = self._spikes_of(optimizer)
        is_spike = [False] * len(table) if spikes is None else spikes.find([mean for _, _, mean in table])
        has_bad_loss = any(bad_loss for bad_loss, _, _ in table)
        has_bad_gradient = any(bad_gradient for _, bad_gradient, _ in table)
        if not (has_bad_loss or has_bad_gradient or any(is_spike)):
            return None
        scale = self._scale() if has_bad_gradient and not has_bad_loss else None
        if scale is not None and scale > 1 and not any(is_spike):
            return None  # an overflow: the scaler skips this step, and lowers the scale
        finding = self._find(measured, is_spike[process.rank if together else 0])
        findings = gather_object([finding], process=process) if together else [finding]
        message = describe(self._steps[optimizer], findings, spikes, scale)
        if self._recorder is None or self._written >= self._settings.max_bundles:
            return message, ""
        return message, self._bundle(Bundle(self._steps[optimizer], message, _ranks(findings)), together)

    def _bundle(self, about: Bundle, together: bool) -> str:
        """Write a bundle; returns what there is to say about it."""
        assert self._recorder is not None, "the caller has asked"
        assert self._settings.bundle is not None, "there is a recorder"
        if self._run.process.world_size > 1 and not together:
            return " No bundle is written inside join_uneven_inputs, where processes may be out of data."
        try:
            folder = write(self._run, self._settings.bundle, about, self._recorder)
        except Exception as error:  # a disk that is full must not end the training
            return f" No bundle could be written ({type(error).__name__}: {error})."
        self._written += 1
        return f" To recompute it: accel replay {shown(folder)}"

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
        # Optimizers that step in turn have losses of their own.
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
    """The processes whose windows are of use: those with a loss that is wrong, else all."""
    own = tuple(finding.rank for finding in findings if finding.is_bad)
    return own or tuple(finding.rank for finding in findings)
