"""The recorder of `accel verify`: samples, losses, gradients and parameters of a run's first steps.

The recorder works in a process that is there for it, and ends it after enough steps. Prepared objects publish
their batches and losses. What is not prepared has to be seen too: models, losses and loaders by classes of
torch whose methods are replaced, the steps of any optimizer by torch's own hooks. It records batches as
loaders yield them, or else the arguments of the model; losses on their way to backward; gradients before and
parameters after each step.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from accel.engines.base import is_native
from accel.engines.common.loader import EngineLoader
from accel.observe.base import ObserverKwargs
from accel.observe.verify.fingerprint import sample_digests, sketch
from accel.observe.verify.patches import replace_function, switch_off
from accel.observe.verify.recorded_runs import record_file
from accel_data.loader.iteration import PreparedLoader
from accel_ops.modules import extract_model_from_parallel
from accel_optim.optimizer import AcceleratedOptimizer
from accel_state import env
from accel_state.devices import table
from accel_state.step_events import Observer, unsubscribe

if TYPE_CHECKING:
    from accel.training.run import Run


@dataclass
class RecordKwargs(ObserverKwargs):
    """Turns on the recorder of `accel verify`, whose settings are in `settings.json` in the folder."""

    def start(self, run: Run) -> Observer:
        """Begin to record; the second Accelerator of a program is not recorded.

        Raises:
            ValueError: If the folder has no settings.
        """
        folder = Path(env.get("ACCELERATE_VERIFY_FOLDER"))
        if not (folder / "settings.json").is_file():
            raise ValueError(
                f"ACCELERATE_VERIFY_FOLDER={folder} has no settings.json. `accel verify` sets it for the "
                "runs that it starts; leave it unset elsewhere."
            )
        if record_file(folder, run.process.rank).exists():
            return Observer()
        return TrainingRecorder(run, folder, **json.loads((folder / "settings.json").read_text()))


@dataclass
class Step:
    """One step of an optimizer: its inputs and its result.

    Attributes:
        optimizer: Which one, in the order in which they first stepped.
        samples: Digests of the samples of its batches.
        losses: Pairs of a loss and its weight; None for a mean, which has none.
        rates: Learning rates of the parameter groups.
        norm: Of the gradients before they were clipped; None where they were not.
        gradients: Sketches by name of the parameter, before the step; likewise `parameters`, after it.
        parameters: Sketches of all parameters.
    """

    optimizer: int = 0
    samples: list[int] = field(default_factory=list)
    losses: list[tuple[float, float | None]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norm: float | None = None
    gradients: dict[str, list[float]] = field(default_factory=dict)
    parameters: dict[str, list[float]] = field(default_factory=dict)


class TrainingRecorder(Observer):
    """Records a run, and ends its process after enough steps of each optimizer.

    Args:
        run: The run.
        folder: Where the record is written.
        steps: How many steps to record.
        batch_factor: How many times as large to make the batches of loaders before they are prepared.
        without_dropout: Whether to switch dropout off.
    """

    def __init__(
        self, run: Run, folder: Path, *, steps: int, batch_factor: int, without_dropout: bool
    ) -> None:
        self._run = run
        self._file = record_file(folder, run.process.rank)
        self._num_steps = steps
        run.batch_factor = batch_factor
        self._without_dropout = without_dropout
        self._roots: list[torch.nn.Module] = []
        self._counts: dict[torch.optim.Optimizer, int] = {}
        self._step = Step()
        self._depth = 0
        self._in_engine = False
        self._weight: tuple[float, float] | None = None  # of the loss to come, and its factor
        self._pending: dict[int, tuple[deque[Any], Any]] = {}  # batches that no pass has used, and loaders
        self._started: dict[int, int] = {}  # by prepared loader the passes before its iteration
        self._reading: Any = None  # the prepared loader that reads a batch
        self._passes = 0  # backward passes
        self._inputs: Any = None
        self._rng: list[torch.Tensor] | None = None  # when the batch came, or the model was called
        self._has_initial = False
        self._detach = ExitStack()
        self.record: dict[str, Any] = {
            "process": run.process.rank,
            "data_rank": run.engine.data_parallel.rank,
            "data_shards": run.engine.data_parallel.size,
            "split_batches": run.dataloader_config.split_batches,
            "precision": run.state.mixed_precision,
            "models": [],
            "batch_norm": [],
            "dropout": [],
            "draws": False,
            "loads": False,
            "not_compared": [],
            "unprepared": {"model": [], "optimizer": [], "loader": []},
            "optimizers": [],
        }
        self._attach()
        self._write()

    def optimizer_prepared(self, optimizer: torch.optim.Optimizer) -> None:
        """Record its kind, which is named if it never steps."""
        self.record["optimizers"].append(type(getattr(optimizer, "optimizer", optimizer)).__name__)
        self._write()

    def loading(self) -> AbstractContextManager[None]:
        """Record that the script loads a checkpoint."""
        self.record["loads"] = True
        return super().loading()

    def stop(self) -> None:
        """Stop recording, and undo what was replaced."""
        unsubscribe(self._run.gradient_state, self)
        self._detach.close()

    def _attach(self) -> None:
        pre = register_optimizer_step_pre_hook(self._before_step)
        post = register_optimizer_step_post_hook(self._after_step)
        self._detach.callback(pre.remove)
        self._detach.callback(post.remove)
        # Classes, to see models, losses and batches that were not prepared.
        self._wrap(torch.nn.Module, "__call__", self._call)
        self._wrap(torch.Tensor, "backward", self._tensor_backward)
        self._wrap(DataLoader, "__iter__", self._iterate)
        # A warning, unless the script asks for an error: some operations have no deterministic kernel.
        strict = torch.are_deterministic_algorithms_enabled()
        lenient = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=not strict or lenient)
        self._detach.callback(torch.use_deterministic_algorithms, strict, warn_only=lenient)
        if self._without_dropout:
            self._wrap(torch.nn.functional, "dropout", switch_off("p", 1))
            self._wrap(torch.nn.functional, "scaled_dot_product_attention", switch_off("dropout_p", 4))

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self._detach.callback(replace_function(owner, name, wrapper))

    # Loaders

    def loader_started(self, loader: Any) -> None:
        """Keep its batches from here."""
        self._pending[id(loader)] = deque(), loader
        self._started[id(loader)] = self._passes

    def before_batch(self, loader: Any) -> None:
        """Ignore what is iterated and called to read a batch."""
        self._depth += 1
        self._reading = loader

    def after_batch(self, loader: Any, batch: Any) -> None:
        """Keep a batch."""
        self._depth -= 1
        self._reading = None
        self._pending[id(loader)][0].append(batch)
        self._rng = self._generators()

    def loader_ended(self, loader: Any) -> None:
        """Forget batches that no pass will use."""
        is_exhausted = self._reading is loader
        if is_exhausted:
            self._depth -= 1
            self._reading = None
        read, _ = self._pending.pop(id(loader))
        self._keep_left(loader, read, is_exhausted, self._started.pop(id(loader)))

    def _keep_left(self, loader: Any, read: deque[Any], is_exhausted: bool, passes_before: int) -> None:
        # Of a loop that was left, the last batch may be used; of one that has read ahead, all will be.
        if is_exhausted:
            left = read if self._passes > passes_before else []
        else:
            left = list(read)[-1:]
        if left:
            self._pending[id(loader)] = deque(left), loader

    def _iterate(self, original: Callable[..., Any], loader: Any) -> Iterator[Any]:
        if self._depth:  # a prepared loader reads it
            return original(loader)  # type: ignore[no-any-return]
        return self._batches(original, loader)

    def _batches(self, original: Callable[..., Any], loader: Any) -> Iterator[Any]:
        with self._inside():
            batches = iter(original(loader))
        self._pending.pop(id(loader), None)
        passes, read, ended = self._passes, deque[Any](), False
        self._pending[id(batches)] = read, loader
        try:
            while True:
                with self._inside():
                    batch = next(batches, self)
                if batch is self:
                    ended = True
                    return
                read.append(batch)
                self._rng = self._generators()
                yield batch
        finally:
            self._pending.pop(id(batches), None)
            self._keep_left(loader, read, ended, passes)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    # Models

    def _call(self, original: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._depth or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        is_training = module.training and torch.is_grad_enabled()
        has_parameters = any(item.requires_grad for item in module.parameters())
        if not is_training and has_parameters:
            for read, _ in self._pending.values():
                read.clear()  # batches of an evaluation
        if is_training and has_parameters:
            self._record_root(module)
            if self._inputs is None:
                self._inputs = [item for item in (*args, kwargs) if not _has_graph(item)]
            if self._rng is None:
                self._rng = self._generators()
        with self._inside():
            return original(module, *args, **kwargs)

    def _generators(self) -> list[torch.Tensor]:
        """The states of torch's generators, by which draws are noticed."""
        states = [torch.get_rng_state()]
        if self._run.process.device.type != "cpu":
            states.append(torch.as_tensor(table.device_spec(self._run.process.device).get_rng_state()))
        return states

    def _record_root(self, module: torch.nn.Module) -> None:
        inner = extract_model_from_parallel(module, keep_torch_compile=False)
        if any(inner is root for root in self._roots):
            return
        self._roots.append(inner)
        name = type(inner).__name__
        self.record["models"].append(name)
        prepared = (item for model in self._run.prepared.models for item in model.modules())
        if inner is module and not any(inner is item for item in prepared):
            self.record["unprepared"]["model"].append(name)
        for path, item in inner.named_modules():
            label = f"{name}.{path}" if path else name
            is_batch_norm = isinstance(item, torch.nn.modules.batchnorm._BatchNorm)
            if is_batch_norm and item.training and not isinstance(item, torch.nn.SyncBatchNorm):
                self.record["batch_norm"].append(label)
            # `p` of all torch's dropouts, whose base class is private.
            if isinstance(item, torch.nn.modules.dropout._DropoutNd) and item.p and item.training:
                if self._without_dropout:
                    item.p = 0.0
                else:
                    self.record["dropout"].append(label)

    def _names(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: dict[str, int] = {}
        for root in self._roots:
            kind = type(root).__name__
            seen[kind] = number = seen.get(kind, 0) + 1
            label = kind if number == 1 else f"{kind} ({number})"
            for name, item in root.named_parameters():
                yield f"{label}.{name}", item

    # Losses

    def loss_weighted(self, weight: Any, factor: Any) -> None:
        """Keep the weight of the loss to come."""
        self._weight = float(weight), float(factor)

    def before_backward(self, loss: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Record a loss."""
        self._record_loss(loss, 1.0 if gradient is None else float(gradient))
        self._in_engine = True

    def after_backward(self, loss: torch.Tensor) -> None:
        """Record losses of other passes again."""
        self._in_engine = False

    def _tensor_backward(
        self, original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if not self._in_engine:
            self._record_loss(loss, 1.0)
        original(loss, *args, **kwargs)

    def _record_loss(self, loss: torch.Tensor, fraction: float) -> None:
        weight, self._weight = self._weight, None
        if loss.numel() == 1:
            value = float(loss.detach()) * fraction
            # A weighted loss has been multiplied by a factor, which is not the same on one process.
            pair = (value, None) if weight is None else (value / weight[1] if weight[1] else 0.0, weight[0])
            self._step.losses.append(pair)
        self._passes += 1
        used = [(read.popleft(), loader) for read, loader in self._pending.values() if read]
        for batch, loader in used:
            self._step.samples += sample_digests(batch)
            if not isinstance(loader, PreparedLoader | EngineLoader):
                name = f"{type(loader).__name__} of {type(loader.dataset).__name__}"
                if name not in self.record["unprepared"]["loader"]:
                    self.record["unprepared"]["loader"].append(name)
        if not used and self._inputs is not None:
            self._step.samples += sample_digests(self._inputs)
        self._inputs = None
        if self._rng is not None:
            pairs = zip(self._rng, self._generators(), strict=True)
            self.record["draws"] |= not all(torch.equal(*pair) for pair in pairs)
            self._rng = None

    # Steps

    def gradients_clipped(self, norm: torch.Tensor | None) -> None:
        """Record the norm of the gradients before clipping."""
        if self._step.norm is None and norm is not None:
            self._step.norm = float(norm)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, AcceleratedOptimizer):  # the one inside of it is recorded
            return
        if optimizer not in self._counts:
            self._counts[optimizer] = 0
            inner = [getattr(item, "optimizer", item) for item in self._run.prepared.optimizers]
            if not any(optimizer is item for item in inner):
                self.record["unprepared"]["optimizer"].append(type(optimizer).__name__)
        elif next(iter(self._counts.values())) >= self._num_steps:
            self._end()  # one that steps less often than the first does not get as far
        if not self._has_initial:
            initial = self._sketches(self._names())
            self._has_initial = bool(initial)
            self._write(initial=initial)
        names = {id(item): name for name, item in self._names()}
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        self._step.optimizer = list(self._counts).index(optimizer)
        self._step.rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        engine = self._run.engine
        # DeepSpeed and Megatron step flat tensors of which each process has a shard.
        has_engine_optimizer = any(is_native(engine, item) for item in self._run.prepared.optimizers)
        chosen = [item for item in parameters if id(item) in names or not has_engine_optimizer]
        self._step.gradients = self._sketches(
            (names.get(id(item), f"tensor {number} of the optimizer"), item.grad)
            for number, item in enumerate(chosen)
            if item.grad is not None and not engine.parameters.is_shard(item)
        )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, AcceleratedOptimizer):
            return
        self._counts[optimizer] += 1
        self._step.parameters = self._sketches(self._names())
        self._write(step=vars(self._step))
        self._step = Step()
        if min(self._counts.values()) >= self._num_steps:
            self._end()

    def _sketches(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[float]]:
        found = {}
        for name, item in named:
            if self._run.engine.parameters.is_shard(item) or item.is_meta or item.is_complex():
                if name not in self.record["not_compared"]:
                    self.record["not_compared"].append(name)
                continue
            tensor = item.detach()
            # A collective; all processes go through the names in one order.
            found[name] = sketch(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
        return found

    def _write(self, **more: Any) -> None:
        # After each step, as the script may be ended by something else.
        with self._file.open("a") as file:
            file.write(json.dumps({**self.record, **more}) + "\n")

    def _end(self) -> None:
        """End the script; what it does at its end, such as in `finally`, still runs."""
        self.stop()
        raise SystemExit(0)


def _has_graph(item: Any) -> bool:
    """Whether it was computed by a model: what is compared to the last bit is what was read."""
    return isinstance(item, torch.Tensor) and item.requires_grad
