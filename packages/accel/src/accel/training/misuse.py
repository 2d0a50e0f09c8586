"""Warnings of mistakes that train wrongly without an error, found in the first steps or at the first save.

From the first `prepare` or backward pass on, torch calls back at every optimizer's step. That ends as soon as
all that is prepared has stepped, and after 100 steps or backward passes in any case: later ones cost nothing.
All runs of a process share one hook. It stays where a run is collected, as torch may be going through its
hooks then, and is removed when no other is checked any more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from accel_data.dispatch.loader import JoinedBatches
from accel_data.loader.base import Unbatched
from accel_data.order.detect_sharding import describe_full_data
from accel_data.order.samplers import BatchSamplerShard
from accel_data.stream.dataset import BlockReader
from accel_ops.collectives.comparison import (
    PATIENCE,
    is_equal_on_all_ranks,
    is_first_to_differ,
    new_comparison_name,
)
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.training.run import Run

# Runs whose steps are checked. Weakly, as torch keeps the hook for all optimizers, and must not keep a run.
# No WeakSet: going through one takes microseconds, in each step of loops that never call `backward` here.
_checked_runs: list[ref[Run]] = []
_hooks: list[Any] = []  # the handle of the hook, while there is one
_MOST = 100  # steps or backward passes: past warmup, and small beside any run


class Watch:
    """Follows the first steps of one Accelerator's training. A copy of it begins anew."""

    def __init__(self) -> None:
        self._passes = 0
        self._steps = 0
        self._outside = 0
        self._stepped: set[int] = set()
        self._compared: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._is_over = False
        self._is_data_checked = False
        self._is_save_checked = False
        self._unprepared: WeakSet[torch.optim.Optimizer] = WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()  # the weak references cannot be copied

    def begin(self, run: Run) -> None:
        """Check the first steps: a loader or scheduler was prepared."""
        if not (self._passes or self._steps):
            _start(run)

    def resume(self, run: Run) -> None:
        """Check the next steps too: a model or optimizer was prepared."""
        # A new model or optimizer may be misused in ways that those before it were not.
        self._passes = self._steps = 0
        self._is_over = self._is_save_checked = False
        _start(run)

    def before_backward(self, run: Run, is_mean: bool) -> bool:
        """Count a backward pass, and begin or end to check steps.

        Args:
            run: Whose it is.
            is_mean: Whether its loss is divided by the number of accumulation steps.

        Returns:
            Whether the next pass is to be counted too.
        """
        self._passes += 1
        if self._is_over or self._passes > _MOST:
            _stop(run)
            return False
        _start(run)
        self._outside += is_mean and not run.window.in_micro_batch  # weights make a window of any loop
        return True

    def before_step(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        """Check the step that an optimizer, prepared or not, is about to make."""
        self._steps += 1
        if self._is_over or self._steps > _MOST:
            return  # torch is going through its hooks: this one is taken out at the next save or backward
        # By id: parameters of one model may be in several optimizers, and tensors compare by value.
        given = {id(item): item for item in _parameters(optimizer)}
        held = {id(item) for prepared in run.optimizers for item in _parameters(prepared)}
        known = {id(item): item for item in _prepared_parameters(run)}
        if given.keys() <= held:  # it is prepared, or inside of what is
            self._check_window(run)
            self._check_model(run, optimizer, given, known)
        elif _is_meant(run, given, known):
            self._check_window(run)
            self._check_optimizer(run, optimizer, given)
            self._check_model(run, optimizer, given, known)
        else:
            return
        self._check_data(run)
        self._stepped |= given.keys()
        trained = {key for key, item in known.items() if item.requires_grad}
        self._is_over = held <= self._stepped and trained <= self._stepped

    def before_save(self, run: Run) -> None:
        """Warn of what trains and is not in the checkpoint, at the first save."""
        if self._is_over or self._steps > _MOST:
            _stop(run)
        if self._is_save_checked or run.save_hooks:  # which may save anything
            return
        self._is_save_checked = True
        saved = {id(getattr(item, "optimizer", item)) for item in run.optimizers}
        saved |= {id(item) for item in run.registered}
        left = [type(item).__name__ for item in self._unprepared if id(item) not in saved]
        modules = [item for item in run.registered if isinstance(item, torch.nn.Module)]
        # What has a state of another kind may save any parameter.
        if all(hasattr(item, "param_groups") for item in run.registered if item not in modules):
            known = {id(item) for item in _prepared_parameters(run)}
            known |= {id(item) for module in modules for item in module.parameters()}
            held = [item for each in (*run.optimizers, *self._unprepared) for item in _parameters(each)]
            loose = [item for item in held if id(item) not in known and isinstance(item, torch.nn.Parameter)]
            if loose:
                left.append(_described(loose))
        if left:
            warn(
                f"save_state leaves out what is trained and not prepared: {' and '.join(left)}. load_state "
                "could not go on from here. Pass all that is trained to accelerator.prepare(), or to "
                "register_for_checkpointing()."
            )

    def _check_window(self, run: Run) -> None:
        state, outside = run.gradient_state, self._outside
        self._outside = 0
        if 0 < outside < state.num_steps and state.sync_gradients and not state.end_of_dataloader:
            steps = state.num_steps
            warn(
                f"gradient_accumulation_steps={steps}, and an optimizer steps after {outside} backward "
                f"pass(es) outside of accumulate(): gradients are too small, as each loss is divided by "
                f"{steps}. Put each micro-batch into `with accelerator.accumulate(model):`, or step after "
                f"{steps} backward passes, or leave gradient_accumulation_steps out."
            )

    def _check_model(
        self,
        run: Run,
        optimizer: torch.optim.Optimizer,
        given: dict[int, torch.Tensor],
        known: dict[int, torch.Tensor],
    ) -> None:
        size, is_standalone = run.engine.loaders.dp_rank_and_size[1], run.engine.gradient_sync.is_standalone
        # On one process there is nobody to average with.
        if size == 1 or optimizer in self._compared:
            return
        # DeepSpeed and Megatron step copies of parts, and reduce their gradients themselves.
        own = [item for item in run.optimizers if run.engine.states.has_native_checkpoint(item)]
        theirs = {id(item) for each in own for item in _parameters(each)}
        new = [item for key, item in given.items() if key not in known and key not in theirs]
        loose = [item for item in new if _has_whole_gradient(item) and not is_standalone(item)]
        if not loose:
            return
        self._compared.add(optimizer)
        what = _described(loose)
        # Equal ones are averaged, by DistributedDataParallel or in any other way.
        if is_first_to_differ(new_comparison_name(f"gradients of {what}"), _digest(loose)):
            warn(
                f"{type(optimizer).__name__} steps {what}, which are in no prepared model, and their "
                f"gradients differ between the {size} processes: nobody averages them, and each process "
                "trains other weights. Pass the model to accelerator.prepare(), and use the model that comes "
                "back.",
                about="process",
            )

    def _check_data(self, run: Run) -> None:
        size = run.engine.loaders.dp_rank_and_size[1]
        # Where a prepared loader gives the batches, nothing is searched for.
        if size == 1 or self._is_data_checked or run.gradient_state.in_dataloader:
            return
        if run.dataloader_config.presharded:
            return
        self._is_data_checked = True
        # Imported here, as most programs never come here.

        for iterated in _plain_iterations():
            # Privates of torch's iteration, which does not keep its loader.
            dataset, sampler = iterated._dataset, iterated._index_sampler
            data = describe_full_data(SimpleNamespace(dataset=dataset, sampler=sampler, batch_sampler=None))
            if data is None:
                continue
            # Processes may have parts that were made by hand: each says what it reads, and rank 0 waits.
            patience = PATIENCE if run.process.rank == 0 else timedelta(seconds=0.01)
            name = new_comparison_name("unprepared_loader")
            if is_equal_on_all_ranks(name, data, run.process.world_size, patience):
                warn(
                    f"A DataLoader over {type(dataset).__name__} is not prepared, and each of {size} "
                    "processes trains on all of its data, unless you gave each its own part. Pass it to "
                    "accelerator.prepare(), and use the loader that comes back; if each process has its own "
                    "part, with DataLoaderConfiguration(presharded=True), which also ends this warning."
                )
            return

    def _check_optimizer(
        self, run: Run, optimizer: torch.optim.Optimizer, given: dict[int, torch.Tensor]
    ) -> None:
        if optimizer in self._unprepared:
            return
        # Noted, also if its steps are right: it is missing in checkpoints.
        self._unprepared.add(optimizer)
        wrong = list(_wrong_steps(run, optimizer, given))
        if wrong:
            warn(
                f"{type(optimizer).__name__} is not prepared, and {', and '.join(wrong)}. Pass it to "
                "accelerator.prepare(), and use the optimizer that comes back."
            )


def _start(run: Run) -> None:
    """Check the steps of a run."""
    if all(held() is not run for held in _checked_runs):
        # Without those that are gone, so that many runs, as in a search, leave no long list.
        _checked_runs[:] = [*(held for held in _checked_runs if held() is not None), ref(run)]
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _stop(run: Run) -> None:
    """Check the steps of a run no longer; without any other, torch calls nothing."""
    _checked_runs[:] = [held for held in _checked_runs if held() not in (None, run)]
    if not _checked_runs and _hooks:
        _hooks.pop().remove()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():  # a compiled step would trace the hook
        for held in _checked_runs:
            run = held()
            if run is not None:
                run.watch.before_step(run, optimizer)


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _prepared_parameters(run: Run) -> Iterator[torch.Tensor]:
    """The parameters of prepared models, whole and in parts where a forward pass has gathered them."""
    for model in run.models:
        yield from model.parameters()
        yield from run.engine.gradients.tensors_with_grad(model.parameters())


def _is_meant(run: Run, given: dict[int, torch.Tensor], known: dict[int, torch.Tensor]) -> bool:
    """Whether an unprepared optimizer belongs to this training, and not to something else in the program."""
    prepares_training = run.optimizers or any(item.requires_grad for item in known.values())
    return bool(given.keys() & known.keys()) or not prepares_training or _is_replaced(run, given)


def _is_replaced(run: Run, given: dict[int, torch.Tensor]) -> bool:
    """Whether others are in place of an optimizer's parameters, since their model was sharded."""
    trained = run.engine.gradient_sync.trained_parameter
    return any(trained(item) is not item for item in given.values() if isinstance(item, torch.nn.Parameter))


def _wrong_steps(run: Run, optimizer: torch.optim.Optimizer, given: dict[int, torch.Tensor]) -> Iterator[str]:
    """The mistakes in the steps of an unprepared optimizer; often there are none."""
    if _is_replaced(run, given):
        yield "steps parameters that its model no longer has, since it was sharded"
    scaler = run.scaler
    # A private of torch's scaler, which alone has what unscaled its gradients; no method says it.
    if scaler is not None and scaler.is_enabled() and id(optimizer) not in scaler._per_optimizer_states:
        yield "steps with gradients that are multiplied by the loss scale of fp16 training"
    if not run.gradient_state.sync_gradients:
        yield "steps in the middle of an accumulation window"


def _has_whole_gradient(item: torch.Tensor) -> bool:
    """Whether a parameter has the gradient of all of it here, and not of a part."""
    # A DTensor has a mesh; asking for its type would import torch.distributed.tensor. The other is FSDP1's.
    is_part = hasattr(item, "device_mesh") or hasattr(item, "_fsdp_flattened")
    return type(item.grad) is torch.Tensor and not is_part


def _described(parameters: Sequence[torch.Tensor]) -> str:
    shapes = ", ".join(str(tuple(item.shape)) for item in parameters[:4])
    more = ", ..." if len(parameters) > 4 else ""
    return f"{len(parameters)} parameter(s) of shape {shapes}{more}"


def _digest(parameters: Iterable[torch.Tensor]) -> str:
    """A sum over the bits of gradients, which does not depend on the order of its terms."""
    total = 0
    for item in parameters:
        gradient = item.grad
        assert gradient is not None, "it has one"
        values = gradient.coalesce().values() if gradient.is_sparse else gradient.detach()
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        total += int(values.view(bits).sum())
    return str(total)


def _plain_iterations() -> list[Any]:
    """The iterations over loaders that are going on, but for those of prepared loaders."""
    kinds = [_BaseDataLoaderIter]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
    # An object refers to its type. This takes as long as one garbage collection.
    found = [item for item in gc.get_referrers(*kinds) if issubclass(type(item), _BaseDataLoaderIter)]
    ours = (BatchSamplerShard, Unbatched, JoinedBatches)
    return [
        item
        for item in found
        if not isinstance(item._index_sampler, ours) and not isinstance(item._dataset, BlockReader)
    ]
