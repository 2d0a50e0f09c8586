"""Replaying a bundle: a script runs up to its loop, and there computes the losses of the bundle's window."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel.observe.base import ObserverKwargs
from accel.observe.guard.batch import BatchError, decode
from accel.observe.guard.bundle import display_path, read_facts, read_window
from accel.observe.guard.record import called_module, loader_number, model_buffers
from accel_ckpt.errors import CheckpointError
from accel_ckpt.file_names import rank_of
from accel_ckpt.training_state.rng import set_rng_state
from accel_ops.trees.walk import find_path, flatten
from accel_state import env
from accel_state.logging.warning import warn
from accel_state.step_events import Observer

if TYPE_CHECKING:
    from accel.training.run import Run


class ReplayEnded(SystemExit):
    """Ends a script whose window has been computed; its code is 0 if all losses were the same, else 1."""


class ReplayKwargs(ObserverKwargs):
    """Replay the window of one process of a bundle, in the file that ACCELERATE_REPLAY names."""

    def start(self, run: Run) -> Observer:
        """Make what replays it.

        Raises:
            CheckpointError: If the bundle is not there, or damaged.
            ValueError: If there are several processes.
        """
        return _Replay(run, Path(env.get("ACCELERATE_REPLAY")))


class _Replay(Observer):
    def __init__(self, run: Run, path: Path) -> None:
        if run.process.world_size > 1:
            raise ValueError(
                f"ACCELERATE_REPLAY is set, and there are {run.process.world_size} processes: one replays a "
                "bundle. Use `accel replay`."
            )
        self._run, self._folder = run, path.parent
        self._facts, window = read_facts(path.parent), read_window(path)
        self._micro_batches: list[dict[str, Any]] = window["micro_batches"]
        self._has_buffers: set[int] = set()  # models that have got those of the micro-batch
        self._place = (0, 0)  # micro-batch, and backward pass in it
        self._is_restored = False
        self._is_same = True
        self._found: dict[str, str] = {}
        # As long as the recorded window, or losses would be divided by another number.
        run.gradient_state.plugin_kwargs["num_steps"] = self._facts["num_steps"]
        # Sums depend on how many threads share them.
        torch.set_num_threads(window["num_threads"])
        here, there = str(run.state.mixed_precision), self._facts["mixed_precision"]
        if here != there:
            warn(f"The bundle was written with mixed_precision={there!r}, and it is {here!r} here.")
        folder, size = display_path(path.parent), self._facts["world_size"]
        print(f"Replaying {folder}, rank {rank_of(path.name)} of {size}.")
        print(self._facts["message"])

    def before_step(self, optimizer: Any) -> bool:
        """Skip it: the window is computed with one set of weights."""
        return True

    def after_batch(self, loader: Any, batch: Any) -> Any:
        """Replace a batch by that of the bundle."""
        number = loader_number(self._run, loader)
        recorded = self._micro_batches[self._place[0]]["handed"].get(number)
        if number is None or recorded is None:
            return None
        if not self._is_restored:
            self._restore()
        try:
            chosen = decode(recorded["batch"], batch, self._run.process.device)
        except BatchError as error:
            raise CheckpointError(f"{self._folder} cannot be replayed: {error}.") from error
        self._has_buffers.clear()
        self._print_batch(number, recorded, chosen)
        set_rng_state(recorded["rng"], self._run.process)
        return chosen

    def _restore(self) -> None:
        """Load the state before the step, and look at what follows."""
        from accel.saving.load import load_state

        self._is_restored = True
        run = self._run
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another number of processes, and of what only training needs
            load_state(run, str(self._folder), None, strict=False)
        for number, model in enumerate(run.prepared.models):
            called_module(run, model).register_forward_pre_hook(partial(self._before_forward, number))
            self._look_at(model, f"models[{number}]." if len(run.prepared.models) > 1 else "")

    def _before_forward(self, number: int, model: torch.nn.Module, _: Any) -> None:
        recorded = self._micro_batches[self._place[0]]["buffers"].get(number, {})
        if number not in self._has_buffers:
            self._has_buffers.add(number)
            buffers = model_buffers(model)
            with torch.no_grad():
                for name in buffers.keys() & recorded.keys():
                    buffers[name].copy_(recorded[name])

    def _look_at(self, model: torch.nn.Module, prefix: str) -> None:
        plain = self._run.engine.unwrap_model(model, keep_torch_compile=False)
        for name, parameter in plain.named_parameters():
            if not _is_finite([parameter.detach()]):
                self._found.setdefault("parameter that is not finite before", prefix + name)
            if parameter.requires_grad and not self._run.engine.traits.shards_gradients:
                parameter.register_post_accumulate_grad_hook(partial(self._reached, prefix + name))  # type: ignore[no-untyped-call]
        for name, module in plain.named_modules():
            label = (
                f"{prefix}{name} ({type(module).__name__})"
                if name
                else f"the model ({type(module).__name__})"
            )
            module.register_forward_hook(partial(self._check_output, label))

    def _check_output(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        if not _is_finite(flatten(output)[0]):
            self._found.setdefault("module whose output is not finite", name)

    def _reached(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not _is_finite([parameter.grad]):
            self._found.setdefault("parameter in backward whose gradient is not finite", name)

    def _look_at_shards(self) -> None:
        """Look at gradients that come by no hook, from the model's last parameter on."""
        engine = self._run.engine
        if engine.traits.shards_gradients:
            for model in self._run.prepared.models:
                plain = engine.unwrap_model(model, keep_torch_compile=False)
                for name, parameter in reversed([*plain.named_parameters()]):
                    self._reached(name, engine.parameters.trained(parameter))

    def _print_batch(self, number: int, recorded: dict[str, Any], batch: Any) -> None:
        index = self._place[0]
        samples = "" if recorded["indices"] is None else f", samples {recorded['indices']}"
        print(
            f"Micro-batch {index + 1} of {len(self._micro_batches)}: batch {recorded['number']} of epoch "
            f"{recorded['epoch']} of loader {number}{samples}"
        )
        found = find_path(batch, _is_broken, "batch")
        if found is not None:
            self._found.setdefault("tensor of a batch that is not finite", found[0])

    def _expected(self) -> dict[str, Any]:
        micro_batch, index = self._place
        expected: dict[str, Any] = self._micro_batches[micro_batch]["losses"][index]
        return expected

    def loss_weighted(self, weight: Any, factor: Any) -> Any:
        """Use the factor of all processes, which one alone does not know."""
        return self._expected()["factor"] if self._is_restored else None

    def before_backward(self, loss: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Compare a loss with the recorded one."""
        if self._is_restored:
            expected = self._expected()
            if expected["compared"]:
                self._compare(expected["loss"], loss.detach().cpu())

    def after_backward(self, loss: torch.Tensor) -> None:
        """Go on to the next loss, or end the script."""
        if not self._is_restored:
            return
        micro_batch, index = self._place
        if index + 1 < len(self._micro_batches[micro_batch]["losses"]):
            self._place = micro_batch, index + 1
        elif micro_batch + 1 < len(self._micro_batches):
            self._place = micro_batch + 1, 0
        else:
            self._look_at_shards()
            for what, name in self._found.items():
                print(f"The first {what}: {name}")
            print("All losses are the same." if self._is_same else "The losses differ.", flush=True)
            raise ReplayEnded(0 if self._is_same else 1)

    def _compare(self, recorded: torch.Tensor, here: torch.Tensor) -> None:
        is_same = recorded.dtype == here.dtype and _bits(recorded) == _bits(here)
        self._is_same &= is_same
        print(
            f"  loss recorded {_format_tensor(recorded)}, recomputed {_format_tensor(here)}: "
            f"{'the same' if is_same else 'different'}"
        )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(value: torch.Tensor) -> list[int]:
    # As integers, since NaN equals nothing.
    bits: list[int] = value.reshape(-1).contiguous().view(_INTEGERS[value.element_size()]).tolist()
    return bits


def _format_tensor(value: torch.Tensor) -> str:
    size = value.element_size()
    bits = ", ".join(f"0x{item & (1 << 8 * size) - 1:0{2 * size}x}" for item in _bits(value))
    number = float(value) if value.numel() == 1 else math.nan
    return f"{number:.9g} ({bits})" if value.numel() == 1 else bits


def _is_broken(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not _is_finite([leaf])


def _is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    values = (item.to_local() if hasattr(item, "to_local") else item for item in tensors)
    return all(bool(torch.isfinite(item).all()) for item in values if item.is_floating_point())
