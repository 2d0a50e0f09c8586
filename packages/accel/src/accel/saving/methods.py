"""The checkpoint side of the Accelerator: what is saved and loaded, and what goes along with it.

The code behind is imported by the first call, since a run may never save.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from accel.observe.base import observed
from accel_state.logging.warning import warn
from accel_state.verify import output_path

if TYPE_CHECKING:
    from accel.training.run import Run


class CheckpointControl:
    """Mixin with everything that saves and loads.

    A subclass has the attributes that are declared here.
    """

    run: Run

    @property
    def should_save_model(self) -> bool:
        """Whether this process holds weights that have to be written."""
        return self.run.engine.states.saves_model

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write `obj` once per job (or once per machine, with save_on_each_node)."""
        # Imported here, as in the other methods: a run that never saves need not wait for it.
        from accel_ckpt.files import tensors

        each_node = self.run.project_configuration.save_on_each_node
        tensors.save(obj, f, save_on_each_node=each_node, safe_serialization=safe_serialization)

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        *,
        main_process_only: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write everything that `load_state` needs to go on from here; returns the folder.

        With `blocking=False` the state is copied, and written and committed in the background while training
        goes on. One such save is in flight at most: the next call waits for it, and raises what went wrong in
        it, as do `wait_for_save`, `load_state` and `end_training`.

        Every process calls it, and waits for the others. `main_process_only=True` says that the main process
        calls it alone: the checkpoint then lacks the random generators of the others. By default that is
        taken from the code around the call (`if accelerator.is_main_process:`).
        """
        with observed(self.run, "saving"):
            from accel.saving import save
            from accel.saving.saving_process import saving_process

            output_dir = output_path(output_dir)
            process = saving_process(self.run, "save_state", main_process_only)
            if process is None:
                return save.saved_folder(self.run, output_dir)
            save_model_func_kwargs["process"] = process
            return save.save_state(self.run, output_dir, safe_serialization, **save_model_func_kwargs)

    def wait_for_save(self) -> None:
        """Wait until the save in the background, if there is one, is committed; raise what went wrong."""
        from accel_ckpt.background import thread

        thread.wait()

    def save_on_preemption(
        self,
        output_dir: str | None = None,
        *,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        exit_code: int = 75,  # EX_TEMPFAIL of sysexits.h
    ) -> None:
        """Save and exit if any process got a signal to end. Every process calls it, at the end of each step.

        The first call takes the signals. A signal to any process makes all of them save, commit and exit in
        the same step: at one of the next two calls at which no accumulation window is open. `load_state` then
        goes on exactly there.

        Args:
            output_dir: The folder of the checkpoint; not needed with automatic naming.
            signals: Names of the signals.
            exit_code: How the processes end. The default, EX_TEMPFAIL, asks to be started again.

        Raises:
            SystemExit: With `exit_code`, when the checkpoint is committed.
            ValueError: If there is no folder to save to, or the system has none of the signals.
            RuntimeError: If this is not the main thread.
        """
        from accel.saving.preemption import preemption_signal

        why = preemption_signal(self.run, output_dir, signals)
        if why is None:
            return
        try:
            self.wait_for_save()
        except Exception as error:  # this is the last chance to save
            warn(f"The save before failed: {type(error).__name__}: {error}.")
        folder = self.save_state(output_dir)
        if self.run.process.is_main:
            said = f"Preempted ({why}): saved {folder}; exiting with {exit_code}."
            print(said, file=sys.stderr, flush=True)
        # Trackers are flushed, and the process group ends on all: no process waits for one that is gone.
        self.end_training()
        raise SystemExit(exit_code)

    def end_training(self) -> None:
        """Finish all that is under way."""
        raise NotImplementedError

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> bool:
        """Restore what `save_state` wrote; without a folder, the newest automatically named one.

        A script that is started again resumes with `load_state(missing_ok=True)`, which does nothing where
        there is no checkpoint yet; a checkpoint that is damaged, or differs from the objects, is an error all
        the same.

        Args:
            input_dir: The folder; None for the newest automatically named one.
            load_kwargs: Options of `torch.load` for everything but weights.
            **load_model_func_kwargs: `missing_ok`, `strict`, `verify`, `map_location`, and options of the
                models' `load_state_dict` (under DeepSpeed, of its `load_checkpoint`).

        Returns:
            Whether a checkpoint was restored: True, but with `missing_ok` where there is none.

        Raises:
            ValueError: If there is no folder to read from.
            FileNotFoundError: If there is no checkpoint in it, and `missing_ok` is not set.
            CheckpointError: If it is damaged, or differs from the objects.
        """
        with observed(self.run, "loading"):
            from accel.saving import load

            return load.load_state(self.run, input_dir, load_kwargs, **load_model_func_kwargs)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state of a prepared model."""
        return self.run.engine.states.state_dict(model, unwrap)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        main_process_only: bool | None = None,
    ) -> None:
        """Write a model's weights into a folder, as `load_checkpoint_in_model` reads them.

        Every process calls it, or the main process alone: `main_process_only` is as for `save_state`.
        """
        from accel.saving import save
        from accel.saving.saving_process import saving_process

        process = saving_process(self.run, "save_model", main_process_only)
        if process is not None:
            state = self.get_state_dict(model)
            folder = output_path(save_directory)
            save.save_model(self.run, state, folder, max_shard_size, safe_serialization, process)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects (with state_dict and load_state_dict) along with the state."""
        from accel.saving import save

        save.register(self.run, objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before `save_state` writes.

        `weights` has the state of each model (this process's part of it where checkpoints are in parts), but
        not of those in an engine's own files (DeepSpeed, LOCAL_STATE_DICT). What a hook takes out of this
        list is not saved: the hook writes it itself.
        """
        # torch's handle removes the hook from this very dictionary, by its id.
        handle = RemovableHandle(self.run.save_hooks)
        self.run.save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before `load_state` reads.

        The weights of a model that a hook takes out of the list are not loaded, but for those in an engine's
        own files; its optimizer's state is.
        """
        handle = RemovableHandle(self.run.load_hooks)
        self.run.load_hooks[handle.id] = hook
        return handle
