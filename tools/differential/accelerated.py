"""A program through accel's documented interface, as one rank of an engine's world."""

from __future__ import annotations

import contextlib
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, broadcast_object_list

from .engines import ENGINES
from .follow import MAX_NORM, MAX_VALUE, Refused, follow
from .model import (
    GLOBAL_BATCH,
    Samples,
    evaluation_samples,
    make_net,
    make_optimizers,
    make_schedules,
    mean_loss,
    sum_loss,
)
from .program import Program
from .trace import Trace

__all__ = ["AcceleratedSession", "orders", "run"]

_PACKAGES = ("accel", "accel_state", "accel_ops", "accel_data", "accel_optim", "accel_ckpt")


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Errors that accel raises on purpose become `Refused`; others, and torch's, stay what they are."""
    try:
        yield
    except (ValueError, RuntimeError, TypeError) as error:
        last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        if last.f_globals["__name__"].split(".")[0] in _PACKAGES and line.startswith("raise "):
            raise Refused(f"{type(error).__name__}: {error}") from error
        raise


class AcceleratedSession:
    """A training with accel.

    Args:
        program: The program.
        engine: The engine's name in `ENGINES`.
    """

    folder: str
    """Of checkpoints, the same on all ranks."""

    def __init__(self, program: Program, engine: str) -> None:
        self.program = program
        case = ENGINES[engine]
        self.accelerator = Accelerator(
            gradient_accumulation_steps=program.accumulation,
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            **case.options(program),
        )
        # The first process's weights count.
        self._prepare(make_net(program, case.dtype, self.accelerator.process_index))
        self.has_saved = False

    def _prepare(self, net: torch.nn.Module) -> None:
        program = self.program
        optimizers = make_optimizers(program, net)
        schedules = make_schedules(program, optimizers)
        samples = Samples(program.length * GLOBAL_BATCH, program.seed)
        generator = torch.Generator().manual_seed(program.seed)
        loader = DataLoader(samples, batch_size=GLOBAL_BATCH, shuffle=True, generator=generator)
        objects = (net, loader, *optimizers, *schedules)
        self.net: torch.nn.Module
        self.net, self.loader, *others = self.accelerator.prepare(*objects)
        self.optimizers: list[Any] = others[: len(optimizers)]
        self.schedules: list[Any] = others[len(optimizers) :]

    @property
    def inner(self) -> Any:
        """The user's own model."""
        return self.accelerator.unwrap_model(self.net)

    def rates(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for item in self.optimizers for group in item.param_groups]

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rest of this epoch, or the next one."""
        return iter(self.loader)

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """The context of one micro-batch."""
        with _refusals(), self.accelerator.accumulate(self.net):
            yield

    def is_boundary(self) -> bool:
        """Whether this micro-batch ends its window."""
        return self.accelerator.sync_gradients

    def finish(self) -> None:
        """Nothing: accel has done it in backward."""

    @contextlib.contextmanager
    def losses(
        self, tokens: torch.Tensor, ids: torch.Tensor, flipped: bool
    ) -> Iterator[tuple[torch.Tensor, int | None]]:
        """The loss of a batch and its weight, in the context in which its backward has to run."""
        tokens = tokens.flip(1) if flipped else tokens
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        ids = ids[:, None].expand_as(labels).contiguous()
        places = torch.arange(labels.shape[1]).expand_as(labels).contiguous()
        shared = [inputs, labels, ids, places, self.inner.positions]
        no_restore = {inputs, labels, ids, places}
        with self.accelerator.maybe_context_parallel(shared, [1, 1, 1, 1, 0], no_restore):
            logits = self.net(inputs)
            if self.program.weighted:
                yield sum_loss(logits, labels, ids, places)
            else:
                yield mean_loss(logits, labels), None

    def backward(self, loss: torch.Tensor, weight: int | None, keeps_graph: bool = False) -> None:
        """Its backward pass."""
        weighted = {} if weight is None else {"weight": weight}
        self.accelerator.backward(loss, **weighted, **({"retain_graph": True} if keeps_graph else {}))

    def shown(self, loss: torch.Tensor, weight: int | None) -> float:
        """The loss of all processes."""
        mean = float(self.accelerator.reduce(loss.detach(), "mean"))
        if weight is None:
            return mean
        return mean * self.accelerator.num_processes / _replicas(self.accelerator)

    def ids(self, ids: torch.Tensor) -> list[int]:
        """The samples of all processes."""
        return sorted(set(self.accelerator.gather(ids).tolist()))

    def clip(self, how: str) -> float | None:
        """Clip; returns the norm, if there is one."""
        if how == "value":
            self.accelerator.clip_grad_value_(self.net.parameters(), MAX_VALUE)
            return None
        chosen = self.net if how == "norm" else self.inner.blocks[0]
        norm = self.accelerator.clip_grad_norm_(chosen.parameters(), MAX_NORM)
        return None if norm is None else float(norm)

    def act(self, action: str) -> Any:
        """Do what comes before a micro-batch; returns what it shows, if anything."""
        with _refusals():
            return getattr(self, "_" + action.replace(" ", "_"))()

    def _evaluate(self) -> float:
        tokens = evaluation_samples(self.program)
        self.net.eval()
        with torch.no_grad():
            loss = mean_loss(self.net(tokens[:, :-1]), tokens[:, 1:])
        self.net.train()
        return float(loss)

    def _forward(self) -> None:
        self.net(evaluation_samples(self.program)[:, :-1])

    def _save(self) -> None:
        self.accelerator.save_state(self.folder)
        self.has_saved = True

    def _load(self) -> None:
        self.accelerator.load_state(self.folder)

    def _add_group(self) -> None:
        for optimizer in self.optimizers[:1]:
            optimizer.add_param_group({"params": list(self.inner.blocks[-1].parameters())})

    def _freeze(self) -> None:
        self.inner.blocks[0].requires_grad_(False)

    def _unfreeze(self) -> None:
        self.inner.blocks[0].requires_grad_(True)

    def _state(self) -> dict[str, torch.Tensor] | None:
        return self.state()

    def _prepare_again(self) -> None:
        # A model that fsdp_version=1 has flattened can only be prepared again with its wrapper.
        net = self.net if self.accelerator.engine.name == "fsdp1" else self.inner
        self.net = self.loader = self.optimizers = self.schedules = None  # type: ignore[assignment]
        self.accelerator.free_memory()
        self._prepare(net)

    def state(self) -> dict[str, torch.Tensor] | None:
        """The full weights, on the ranks that have them."""
        with _refusals():
            state = self.accelerator.get_state_dict(self.net)
        return {name: value.detach().clone() for name, value in state.items()} if state else None


def _replicas(accelerator: Accelerator) -> int:
    """Processes that count a sample's loss once each."""
    return accelerator.num_processes // accelerator.engine.data_parallel.reduced_over


def run(program: Program, engine: str) -> Trace:
    """Follow a program under an engine, as one rank; for `world.run`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # programs do unusual things, of which accel warns
        return _run(program, engine)


def _run(program: Program, engine: str) -> Trace:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as own:
        try:
            with _refusals():
                session = AcceleratedSession(program, engine)
        except Refused as error:
            return Trace(ended=f"prepare: {error}")
        session.folder = str(Path(broadcast_object_list([own])[0]) / "checkpoint")
        trace = follow(program, session)
        session.accelerator.wait_for_everyone()
        session.accelerator.end_training()
    return trace


def orders(program: Program, epochs: int) -> list[list[int]]:
    """The order of samples of some epochs, as one process has it; for `world.run`."""
    samples = Samples(program.length * GLOBAL_BATCH, program.seed)
    generator = torch.Generator().manual_seed(program.seed)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    loader = DataLoader(samples, batch_size=GLOBAL_BATCH, shuffle=True, generator=generator)
    loader = accelerator.prepare(loader)
    return [[int(item) for _, ids in loader for item in ids] for _ in range(epochs)]
