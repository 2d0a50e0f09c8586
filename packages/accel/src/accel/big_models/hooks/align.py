"""The hook that moves a module's weights, inputs and outputs to their devices, and weights back."""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel.big_models.hooks.base import Arguments, ModelHook
from accel.big_models.hooks.offloaded_state import keep_state
from accel.big_models.hooks.prefetch import Prefetcher, read_into_memory
from accel.big_models.hooks.tensors import (
    Copies,
    Device,
    Kept,
    Slot,
    TiedParameters,
    as_device,
    list_tensors,
    tied_key,
)
from accel.big_models.hooks.updated_buffers import UpdatedBuffers, versioned_copy
from accel.big_models.parameters import (
    META,
    bring_to,
    check_no_computed_weights,
    int8_states,
    move,
    on_meta,
)
from accel.precision.outside_dynamo import call_outside_dynamo
from accel_ops.trees.send import send_to_device
from accel_ops.trees.tensors import find_device


class AlignDevicesHook(ModelHook):
    """Move a module's weights and inputs to one device for its forward.

    Args:
        execution_device: The device; None to leave inputs, and weights that are not offloaded, where they
            are.
        offload: Whether the weights are on the device only while the forward runs. Of nested calls, or calls
            in several threads, the last one to end offloads them.
        io_same_device: Move the output to the device of the first tensor among the inputs.
        weights_map: The offloaded weights by name, which may be read on lookup; by default they are
            kept on the CPU.
        offload_buffers: Offload persistent buffers too. Other buffers are on the execution device, as are
            buffers that a forward has updated.
        place_submodules: Also do this for the weights of its submodules.
        skip_keys: Keyword arguments, keys and fields at any depth that are not moved.
        tied_params_map: Copies of tied weights by address and device, shared between the hooks of a model so
            that each device has one copy.

    Attributes:
        prefetcher: Reads weights of the modules that run next, for the hooks of a model with weights on the
            disk; None to read each module's when it runs.
        offloaded_bytes: Bytes of the offloaded weights.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedParameters | None = None,
    ) -> None:
        self.execution_device = None if execution_device is None else as_device(execution_device)
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.original_devices: dict[str, torch.device] = {}
        self.prefetcher: Prefetcher | None = None
        self.slots: list[Slot] = []
        self.offloaded_bytes = 0
        self._handles: tuple[Any, ...] = ()
        self._recurrent = False
        # Running calls: in several threads, or nested.
        self._users = 0
        self._updated = UpdatedBuffers()
        self._kept: list[Kept] = []
        self._int8_states: list[Any] = []
        self._lock = threading.Lock()
        self._calls = threading.local()

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # These cannot be copied or pickled.
        return {key: value for key, value in vars(self).items() if key not in ("_lock", "_calls")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()
        self._calls = threading.local()

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's weights to the execution device, or replace them with placeholders.

        Args:
            module: The module.

        Returns:
            The module.

        Raises:
            ValueError: If a weight is on the meta device and has no values elsewhere, or it is computed
                by torch's old `weight_norm` or similar; the module is unchanged.
        """
        entries = list(list_tensors(module.named_modules() if self.place_submodules else [("", module)]))
        kept = [entry for entry in entries if not self._offloads(entry)]
        offloaded = [entry for entry in entries if self._offloads(entry)]
        self._check(module, kept, offloaded)
        if self.offload:
            self._kept = [
                Kept(table, leaf, table[leaf].device, self._copies(table[leaf])) for table, leaf, _, _ in kept
            ]
        for table, leaf, _, _ in kept:
            if self.execution_device is not None:
                table[leaf] = self._tied_or_moved(table[leaf])
        if self.offload:
            self._offload_weights(offloaded)
            self._recurrent = any(isinstance(item, nn.RNNBase) for item in module.modules())
            self._int8_states = int8_states(module.modules() if self.place_submodules else (module,))
            self._refresh(module)
            self._handles = keep_state(module, self.slots, self._value)
        return module

    def _offloads(self, entry: tuple[dict[str, Any], str, str, str]) -> bool:
        kind = entry[3]
        return self.offload and (kind == "parameter" or (kind == "buffer" and self.offload_buffers))

    def _check(self, module: nn.Module, kept: list[Any], offloaded: list[Any]) -> None:
        if offloaded:
            for item in module.modules() if self.place_submodules else (module,):
                check_no_computed_weights(item)
        lost = []
        if self.execution_device not in (None, META):
            lost = [
                name for table, leaf, name, _ in kept if table[leaf].is_meta and not self._copies(table[leaf])
            ]
        lost += [
            name
            for table, leaf, name, _ in offloaded
            if (table[leaf].is_meta if self.weights_map is None else name not in self.weights_map)
        ]
        if lost:
            raise ValueError(
                f"{type(module).__name__} has no values for {', '.join(lost)} (on the meta device). Load its "
                "weights first, or pass weights_map= (state_dict=, offload_index=)."
            )

    def _copies(self, tensor: torch.Tensor) -> Copies | None:
        return None if self.tied_params_map is None else self.tied_params_map.get(tied_key(tensor))

    def _tied_or_moved(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self.execution_device
        assert device is not None
        copies = self._copies(tensor)
        if copies is None:
            return move(tensor, tensor, device)
        if device not in copies:
            copies[device] = move(tensor, tensor, device)
        return copies[device]

    def _offload_weights(self, offloaded: list[tuple[dict[str, Any], str, str, str]]) -> None:
        weights: dict[str, torch.Tensor] = {}
        slots = []
        for table, leaf, name, _ in offloaded:
            tensor = table[leaf]
            copies = self._copies(tensor)
            if copies is not None and self.execution_device in copies:  # kept there for another module
                table[leaf] = copies[self.execution_device]
                continue
            self.original_devices[name] = tensor.device
            placeholder = on_meta(tensor)
            if copies is not None:
                placeholder = copies.setdefault(META, placeholder)
            if not tensor.is_meta and (self.weights_map is None or self.slots):
                weights[name] = move(tensor, tensor, torch.device("cpu"))
            table[leaf] = placeholder
            slots.append(Slot(table, leaf, name, placeholder, copies))
        if self.weights_map is None:
            self.weights_map = weights
        elif weights:  # the hook has been moved to another module
            self.weights_map = ChainMap(weights, self.weights_map)  # type: ignore[arg-type]
        self.slots = slots
        self.offloaded_bytes = sum(slot.placeholder.nbytes for slot in slots)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Move weights and inputs to the execution device."""
        came_from = find_device([args, kwargs]) if self.io_same_device else None
        if self.slots:
            self.load(module)
        device = self.execution_device
        try:
            if device is not None and args:
                args = send_to_device(args, device, skip_keys=self.skip_keys)
            if device is not None and kwargs:
                kwargs = send_to_device(kwargs, device, skip_keys=self.skip_keys)
        except BaseException:
            if self.slots:
                self.unload(module)
            raise
        if self.io_same_device:
            self._devices_of_calls().append(came_from)
        return args, kwargs

    def _devices_of_calls(self) -> list[torch.device | None]:
        """Return the input devices of this thread's calls, the innermost call's last."""
        devices: list[torch.device | None] | None = getattr(self._calls, "devices", None)
        if devices is None:
            self._calls.devices = devices = []
        return devices

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Remove offloaded weights, and move the output to its device."""
        if self.slots:
            self.unload(module)
        if self.io_same_device:
            device = self._devices_of_calls().pop()
            if device is not None:
                output = send_to_device(output, device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Remove offloaded weights."""
        if self.io_same_device:
            self._devices_of_calls().pop()
        if self.slots:
            self.unload(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Move weights, and buffers that were not offloaded, back to their devices from before the hook.

        Args:
            module: The module. Weights that were on the meta device return to it. If nothing is
                offloaded, everything stays on the execution device.

        Returns:
            The module.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        for slot in self.slots:
            slot.table[slot.leaf] = self._restored(slot)
        self._updated.restore(self.original_devices)
        for entry in self._kept:
            entry.restore(self.tied_params_map)
        self._kept = []
        self._refresh(module)
        return module

    @property
    def is_loaded(self) -> bool:
        """Whether the offloaded weights are loaded now."""
        return self._users > 0

    def fetch(self) -> dict[str, torch.Tensor]:
        """Read the offloaded weights, without loading them into the module.

        Returns:
            Weights by name, on the CPU.
        """
        device = self.execution_device
        there = {slot.name for slot in self.slots if slot.tied is not None and device in slot.tied}
        return {
            slot.name: read_into_memory(self._value(slot)) for slot in self.slots if slot.name not in there
        }

    def values(self) -> dict[str, torch.Tensor]:
        """Return the offloaded weights by name; those on the disk are mapped, and read when they are used."""
        return {slot.name: self._value(slot) for slot in self.slots}

    def _refresh(self, module: nn.Module) -> None:
        """Update the list of weights that recurrent modules keep."""
        if self._recurrent:
            for item in module.modules():
                if isinstance(item, nn.RNNBase):
                    # Private in torch: RNNBase keeps it up to date in __setattr__, and
                    # these tables are written directly.
                    item._flat_weights = [getattr(item, name, None) for name in item._flat_weights_names]

    def _restored(self, slot: Slot) -> torch.Tensor:
        device = self.original_devices[slot.name]
        if device == META:
            return slot.placeholder
        if slot.tied is not None and device in slot.tied:
            return slot.tied[device]
        stored = self._value(slot)
        value = move(stored, slot.placeholder, device)
        if value.data_ptr() == stored.data_ptr() and not isinstance(stored, nn.Parameter):
            value = move(stored.clone(), slot.placeholder, device)  # it may be mapped from a file
        if slot.tied is not None:
            slot.tied[device] = value
        return value

    def _value(self, slot: Slot) -> torch.Tensor:
        assert self.weights_map is not None
        return self.weights_map[slot.name]

    def load(self, module: nn.Module) -> None:
        """Load the offloaded weights, unless a running call has loaded them.

        Args:
            module: The module, for messages.
        """
        call_outside_dynamo(AlignDevicesHook._load, self, module)

    def _load(self, module: nn.Module) -> None:
        with self._lock:
            self._users += 1
            # The weights are loaded already; the last call removes them.
            if self._users > 1:
                return
            try:
                ready = self.prefetcher.take(self) if self.prefetcher is not None else {}
                for slot in self.slots:
                    slot.table[slot.leaf] = value = self._loaded(module, slot, ready)
                    if slot.is_buffer:
                        self._updated.watch(slot, value)
                self._refresh(module)
                if self.prefetcher is not None:
                    self.prefetcher.start_next(self)
            except BaseException:
                self._unload_weights(module)
                raise

    def _loaded(self, module: nn.Module, slot: Slot, ready: dict[str, torch.Tensor]) -> torch.Tensor:
        device = self.execution_device
        if slot.tied is not None and device in slot.tied:
            return slot.tied[device]  # loaded by another module that is still running
        value = ready[slot.name] if slot.name in ready else self._value(slot)
        if value.shape != slot.placeholder.shape:
            raise ValueError(
                f"the offloaded weight {slot.name} has the shape {list(value.shape)}, but in "
                f"{type(module).__name__} {list(slot.placeholder.shape)}. Dispatch the model again."
            )
        value = bring_to(device, value, slot.placeholder)
        if slot.is_buffer:
            value = versioned_copy(value)
        if slot.tied is not None and device is not None:
            slot.tied[device] = value
        return value

    def unload(self, module: nn.Module) -> None:
        """Replace offloaded weights with placeholders, unless another call is still running.

        Args:
            module: The module.
        """
        call_outside_dynamo(AlignDevicesHook._unload, self, module)

    def _unload(self, module: nn.Module) -> None:
        with self._lock:
            self._users -= 1
            if self._users <= 0:
                self._unload_weights(module)

    def _unload_weights(self, module: nn.Module) -> None:
        self._users = 0
        device = self.execution_device
        # In place, as the hooks on the state dict share the list.
        self._updated.take_from(self.slots, self._value, training=module.training)
        for slot in self.slots:
            loaded = slot.table[slot.leaf]
            slot.table[slot.leaf] = slot.placeholder
            copies = {} if slot.tied is None or device is None else slot.tied
            # The copy is dropped with the first module that ends; others that
            # run hold it in their own tables.
            if device in copies and copies[device] is loaded is not slot.placeholder:
                del copies[device]
        # The weight of the last call, which a backward needs.
        if not torch.is_grad_enabled():
            for state in self._int8_states:
                state.CB = None
        self._refresh(module)
