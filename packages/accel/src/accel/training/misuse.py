"""Warnings for mistakes that silently produce wrong training, in the first steps or at the first save.

The checker observes the step from the start of a run, and again from each `prepare` of a model or optimizer.
It unsubscribes itself as soon as everything prepared has stepped, and after 100 steps or backward passes in
any case: later steps cost nothing. Prepared objects publish what it needs. Only where parameters change
although no prepared optimizer stepped, or where nothing that trains is prepared, it searches for the
optimizer that does it, and follows that one by torch's own hook.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from accel.engines.base import is_native
from accel.engines.common.gradients import tensors_with_grad
from accel_ops.collectives.comparison import (
    PATIENCE,
    is_equal_on_all_ranks,
    is_first_to_differ,
    new_comparison_name,
)
from accel_optim.optimizer import AcceleratedOptimizer
from accel_state.logging.warning import warn
from accel_state.step_events import Observer, subscribe, unsubscribe

if TYPE_CHECKING:
    from accel.training.run import Run
    from accel_state.gradient import GradientState

_MOST = 100  # steps, backward passes or batches: past warmup, and few compared with any run
_SEARCHES = (2, 8, 32)  # the passes or batches at which a run that prepares nothing to train is searched


class MisuseChecker(Observer):
    """Checks the first steps of one Accelerator's training. A copy starts again."""

    def __init__(self) -> None:
        self._run: ref[Run] | None = None  # which has this checker
        self._state: GradientState | None = None  # that of the run, which publishes its events
        self._batches = _FirstBatches(self)
        self._passes = 0
        self._steps = 0
        self._passes_outside: int | None = (
            0  # of accumulate(), since the last step; None if that is not known
        )
        self._stepped: set[int] = set()
        self._compared: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._is_over = False
        self._is_data_checked = False
        self._is_save_checked = False
        self._unprepared: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._warned: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._looks = 0  # for changes that no prepared optimizer made
        self._searches = 0
        self._versions: dict[int, int] = {}
        self._hooked: dict[int, Any] = {}  # handles of hooks of unprepared optimizers, by their id

    def __reduce__(self) -> tuple[Any, ...]:
        return MisuseChecker, ()  # weak references cannot be copied

    def start(self, run: Run) -> None:
        """Check the first steps: the run begins, or a loader or scheduler was prepared."""
        if not (self._passes or self._steps):
            self._run, self._state = ref(run), run.gradient_state
            subscribe(run.gradient_state, self)
            if not self._batches.count:
                subscribe(run.gradient_state, self._batches)

    def follow(self, state: GradientState) -> None:
        """Check the steps of another gradient state, which publishes its events to this from here on."""
        self._state = state

    def restart(self, run: Run) -> None:
        """Check the next steps too: a model or optimizer was prepared."""
        # A new model or optimizer may be misused in ways that those before it were not.
        self._passes = self._steps = self._looks = self._searches = self._batches.count = 0
        self._versions.clear()
        self._is_over = self._is_save_checked = False
        self.start(run)

    def before_backward(self, loss: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Count a backward pass, and look for steps that are not published."""
        self._passes += 1
        run = self._checked_run()
        if run is not None:
            if self._passes_outside is not None:
                # Weights make a window of any loop.
                self._passes_outside += run.window.has_means and not run.window.in_micro_batch
            self._check_data(run)
            self.look_for_steps()

    def before_step(self, optimizer: Any) -> None:
        """Check the step that a prepared optimizer is about to make."""
        self._check_step(getattr(optimizer, "optimizer", optimizer))

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps += 1
        run = self._checked_run()
        if run is None or torch.compiler.is_compiling():  # a compiled step would trace this
            return
        # By id: parameters of one model may be in several optimizers, and tensors compare by value.
        stepped = {id(item): item for item in _parameters(optimizer)}
        prepared = {id(item) for each in run.prepared.optimizers for item in _parameters(each)}
        of_models = {id(item): item for item in _prepared_parameters(run)}
        has_seen_window = self._passes_outside is not None
        if stepped.keys() <= prepared:
            self._check_window(run)
            self._check_model(run, optimizer, stepped, of_models)
        elif _belongs_to_run(run, stepped, of_models):
            self._check_window(run)
            self._check_optimizer(run, optimizer, stepped)
            self._check_model(run, optimizer, stepped, of_models)
        else:
            return
        if not self._passes:
            # A loop that calls loss.backward() itself publishes nothing outside of steps.
            self._check_data(run)
        self._stepped |= stepped.keys()
        trained = {key for key, item in of_models.items() if item.requires_grad}
        self._is_over = has_seen_window and prepared <= self._stepped and trained <= self._stepped
        self._checked_run()

    def _checked_run(self) -> Run | None:
        """The run, as long as its steps are checked."""
        run = None if self._run is None else self._run()
        if run is None or self._is_over or max(self._passes, self._steps) > _MOST:
            self._end()
            return None
        return run

    def _end(self) -> None:
        if self._state is not None:
            unsubscribe(self._state, self)
            unsubscribe(self._state, self._batches)
        while self._hooked:
            self._hooked.popitem()[1].remove()

    def look_for_steps(self) -> None:
        """Follow unprepared optimizers, at a batch or backward pass, where one seems to step."""
        run = self._checked_run()
        if run is None:
            return
        self._looks += 1
        if self._is_stepped_by_another(run):
            self._searches += 1
            for optimizer in _unprepared_optimizers(run):
                if id(optimizer) not in self._hooked:
                    self._passes_outside = None
                    self._hooked[id(optimizer)] = optimizer.register_step_pre_hook(self._before_unprepared)

    def _before_unprepared(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        run = None if self._run is None else self._run()
        if run is not None and all(
            getattr(item, "optimizer", item) is not optimizer for item in run.prepared.optimizers
        ):
            self._check_step(optimizer)

    def _is_stepped_by_another(self, run: Run) -> bool:
        """Whether parameters changed that no prepared optimizer steps, or that may have happened unseen."""
        if self._searches > len(_SEARCHES):
            return False
        trained, not_stepped = _not_stepped(run)
        followed = {id(item) for optimizer in self._unprepared for item in _parameters(optimizer)}
        not_stepped = [item for item in not_stepped if id(item) not in followed]
        if not not_stepped:
            # With neither a model nor an optimizer prepared there is no tensor to look at.
            return not trained and not run.prepared.optimizers and self._looks in _SEARCHES
        # Torch's count of changes in place: private, and the only way to see them without a copy.
        versions = {id(item): item._version for item in not_stepped}
        has_changed = any(self._versions.get(key, version) != version for key, version in versions.items())
        self._versions = versions
        # An optimizer may also step what a model had before it was sharded.
        return has_changed or (run.engine.traits.shards_gradients and self._looks in _SEARCHES)

    def before_save(self, run: Run) -> None:
        """Warn of what trains and is not in the checkpoint, at the first save."""
        if self._is_save_checked or run.save_hooks:  # which may save anything
            return
        self._is_save_checked = True
        if not self._is_over and _not_stepped(run)[1]:
            # Those of loops that publish no event; one with a state has stepped.
            self._unprepared.update(
                item for item in _unprepared_optimizers(run, of_models=True) if item.state
            )
        saved = {id(getattr(item, "optimizer", item)) for item in run.prepared.optimizers}
        saved |= {id(item) for item in run.registered}
        left = [type(item).__name__ for item in self._unprepared if id(item) not in saved]
        modules = [item for item in run.registered if isinstance(item, torch.nn.Module)]
        # What has a state of another kind may save any parameter.
        if all(hasattr(item, "param_groups") for item in run.registered if item not in modules):
            of_models = {id(item) for item in _prepared_parameters(run)}
            of_models |= {id(item) for module in modules for item in module.parameters()}
            stepped = [
                item for each in (*run.prepared.optimizers, *self._unprepared) for item in _parameters(each)
            ]
            others = [item for item in stepped if id(item) not in of_models]
            others = [item for item in others if isinstance(item, torch.nn.Parameter)]
            if others:
                left.append(_describe(others))
        if left:
            warn(
                f"save_state leaves out what is trained and not prepared: {' and '.join(left)}. load_state "
                "could not go on from here. Pass all that is trained to accelerator.prepare(), or to "
                "register_for_checkpointing()."
            )

    def _check_window(self, run: Run) -> None:
        state, outside = run.gradient_state, self._passes_outside
        self._passes_outside = 0
        if outside and outside < state.num_steps and state.sync_gradients and not state.end_of_dataloader:
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
        stepped: dict[int, torch.Tensor],
        of_models: dict[int, torch.Tensor],
    ) -> None:
        size = run.engine.data_parallel.size
        # One process has no other to average with.
        if size == 1 or optimizer in self._compared:
            return
        # DeepSpeed and Megatron step copies of shards, and reduce their gradients themselves.
        of_engine = [item for item in run.prepared.optimizers if is_native(run.engine, item)]
        reduced = {id(item) for each in of_engine for item in _parameters(each)}
        reduced |= {id(item) for item in run.engine.parameters.standalone()}
        others = [item for key, item in stepped.items() if key not in of_models and key not in reduced]
        others = [item for item in others if _has_full_gradient(item)]
        if not others:
            return
        self._compared.add(optimizer)
        what = _describe(others)
        # Equal ones are averaged, by DistributedDataParallel or in any other way.
        if is_first_to_differ(new_comparison_name(f"gradients of {what}"), _digest(others)):
            warn(
                f"{type(optimizer).__name__} steps {what}, which are in no prepared model, and their "
                f"gradients differ between the {size} processes: they are not averaged, and each process "
                "trains other weights. Pass the model to accelerator.prepare(), and use the model that comes "
                "back.",
                about="process",
            )

    def _check_data(self, run: Run) -> None:
        size = run.engine.data_parallel.size
        # Where a prepared loader gives the batches, nothing is searched for.
        if size == 1 or self._is_data_checked or run.gradient_state.in_dataloader:
            return
        if run.dataloader_config.presharded:
            return
        self._is_data_checked = True
        # Most programs never get here, nor wait for it to be imported.
        from accel_data.order.detect_sharding import describe_full_data

        for iterated in _plain_iterations():
            # Privates of torch's iteration, which does not keep its loader.
            dataset, sampler = iterated._dataset, iterated._index_sampler
            data = describe_full_data(SimpleNamespace(dataset=dataset, sampler=sampler, batch_sampler=None))
            if data is None:
                continue
            # Data may have been sharded by hand: each process says what it reads, and rank 0 waits.
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
        self, run: Run, optimizer: torch.optim.Optimizer, stepped: dict[int, torch.Tensor]
    ) -> None:
        # Also if its steps are right: it is missing in checkpoints.
        self._unprepared.add(optimizer)
        if optimizer in self._warned:
            return
        wrong = list(_wrong_steps(run, optimizer, stepped))
        if wrong:
            self._warned.add(optimizer)
            warn(
                f"{type(optimizer).__name__} is not prepared, and {', and '.join(wrong)}. Pass it to "
                "accelerator.prepare(), and use the optimizer that comes back."
            )


class _FirstBatches(Observer):
    """Has the checker look for unpublished steps at the first batches, for loops without `backward`."""

    def __init__(self, checker: MisuseChecker) -> None:
        self._checker = ref(checker)
        self.count = 0

    def after_batch(self, loader: Any, batch: Any) -> None:
        checker = self._checker()
        self.count += 1
        if checker is None or self.count > _MOST:  # evaluation, say, which may go on for long
            unsubscribe(loader.gradient_state, self)
        else:
            checker.look_for_steps()


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _prepared_parameters(run: Run) -> Iterator[torch.Tensor]:
    """The parameters of prepared models, full and sharded where a forward pass has gathered them."""
    for model in run.prepared.models:
        yield from model.parameters()
        yield from tensors_with_grad(run.engine.parameters, model.parameters())


def _not_stepped(run: Run) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters of prepared models that train, and those of them that no prepared optimizer steps."""
    trained = [item for item in _prepared_parameters(run) if item.requires_grad]
    if any(
        is_native(run.engine, item) for item in run.prepared.optimizers
    ):  # DeepSpeed and Megatron step copies
        return trained, []
    stepped = {id(item) for each in run.prepared.optimizers for item in _parameters(each)}
    return trained, [item for item in trained if id(item) not in stepped]


def _unprepared_optimizers(run: Run, of_models: bool = False) -> list[torch.optim.Optimizer]:
    """Search for the optimizers of the program that are not prepared; takes as long as a garbage collection.

    Args:
        run: The run.
        of_models: Only those that step a parameter of a prepared model.
    """
    prepared = {id(getattr(item, "optimizer", item)) for item in run.prepared.optimizers}
    found = [
        item
        for item in _instances(torch.optim.Optimizer)
        if id(item) not in prepared and not isinstance(item, AcceleratedOptimizer)
    ]
    if of_models:
        prepared_ids = {id(item) for item in _prepared_parameters(run)}
        found = [item for item in found if any(id(each) in prepared_ids for each in _parameters(item))]
    return found


def _instances(base: type) -> list[Any]:
    """Search for the instances of a class and its subclasses."""
    kinds = [base]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
    # An object refers to its type.
    return [item for item in gc.get_referrers(*kinds) if issubclass(type(item), base)]


def _belongs_to_run(run: Run, stepped: dict[int, torch.Tensor], of_models: dict[int, torch.Tensor]) -> bool:
    """Whether an unprepared optimizer belongs to this training, and not to something else in the program."""
    prepares_training = run.prepared.optimizers or any(item.requires_grad for item in of_models.values())
    return bool(stepped.keys() & of_models.keys()) or not prepares_training or _is_replaced(run, stepped)


def _is_replaced(run: Run, stepped: dict[int, torch.Tensor]) -> bool:
    """Whether sharding a model has replaced parameters of an optimizer."""
    trained = run.engine.parameters.trained
    return any(trained(item) is not item for item in stepped.values() if isinstance(item, torch.nn.Parameter))


def _wrong_steps(
    run: Run, optimizer: torch.optim.Optimizer, stepped: dict[int, torch.Tensor]
) -> Iterator[str]:
    """The mistakes in the steps of an unprepared optimizer; often there are none."""
    if _is_replaced(run, stepped):
        yield "steps parameters that its model no longer has, since it was sharded"
    scaler = run.scaler
    # A private of torch's scaler: no method says whether it has unscaled the gradients of an optimizer.
    if scaler is not None and scaler.is_enabled() and id(optimizer) not in scaler._per_optimizer_states:
        yield "steps with gradients that are multiplied by the loss scale of fp16 training"
    if not run.gradient_state.sync_gradients:
        yield "steps in the middle of an accumulation window"


def _has_full_gradient(item: torch.Tensor) -> bool:
    """Whether a parameter is not sharded and has a gradient here."""
    # A DTensor has a mesh; asking for its type would import torch.distributed.tensor. The other is FSDP1's.
    is_shard = hasattr(item, "device_mesh") or hasattr(item, "_fsdp_flattened")
    return type(item.grad) is torch.Tensor and not is_shard


def _describe(parameters: Sequence[torch.Tensor]) -> str:
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
    """The iterations over loaders that are open, without those of prepared loaders."""
    from accel_data.dispatch.loader import JoinedBatches
    from accel_data.loader.base import Unbatched
    from accel_data.order.samplers import BatchSamplerShard
    from accel_data.stream.dataset import BlockReader

    prepared_types = (BatchSamplerShard, Unbatched, JoinedBatches)
    return [
        item
        for item in _instances(_BaseDataLoaderIter)
        if not isinstance(item._index_sampler, prepared_types) and not isinstance(item._dataset, BlockReader)
    ]
