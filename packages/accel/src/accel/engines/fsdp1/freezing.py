"""Parameters inside flat ones that are frozen or unfrozen during training.

With `use_orig_params` torch computes the full gradient of a flat parameter, including frozen members, and
drops the gradients of these when the window ends (torch 2.10 to 2.13). So a member that is unfrozen inside a
window would get gradients from before, and one that is frozen there would lose its gradients.

A forward pass whose loss is dropped leaves the hooks of its backward pass to the next one, which fails inside
torch where a flat parameter was frozen or unfrozen between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from accel.engines.fsdp1.flat import fsdp_units, is_unreduced


class Freezing:
    """Which members of flat parameters were trained in the open window's last backward pass."""

    def __init__(self) -> None:
        self._trained: weakref.WeakKeyDictionary[Any, list[bool]] = weakref.WeakKeyDictionary()

    def follow(self, models: Iterable[torch.nn.Module]) -> None:
        """Drop gradients of members that were frozen until now; called before each backward.

        Raises:
            ValueError: If the window has gradients of members that are frozen now, next to trained ones.
        """
        for module, handle in fsdp_units(models):
            members = handle.flat_param._params
            now = [item.requires_grad for item in members or ()]
            if not any(now):  # a discriminator, say, while the generator trains
                continue
            before = self._trained.get(module)
            if before is not None and before != now and is_unreduced(handle):
                _check(handle, [was and not is_ for was, is_ in zip(before, now, strict=True)])
                # Views of the full gradient, one for each member (private in torch).
                views = handle._get_unflat_views(handle.flat_param.grad)
                for view, was in zip(views, before, strict=True):
                    if not was:
                        view.zero_()
            self._trained[module] = now

    def finish(self, models: Iterable[torch.nn.Module]) -> None:
        """End the window.

        Raises:
            ValueError: If it has gradients, not yet reduced, of members that are frozen now.
        """
        for module, handle in fsdp_units(models):
            before = self._trained.get(module)
            if before is not None and is_unreduced(handle):
                members = handle.flat_param._params
                _check(
                    handle,
                    [was and not item.requires_grad for was, item in zip(before, members, strict=True)],
                )
        self._trained.clear()


def check_hooks_of_shards(handles: Iterable[Any], model: torch.nn.Module, args: Any) -> None:
    """Reject hooks on parameters that were registered after prepare: they would not be called.

    Args:
        handles: The handles of the model's flat parameters.
        model: The wrapper; with the first argument bound this is a forward pre-hook.
        args: The arguments of forward.

    Raises:
        ValueError: If there are any.
    """
    for handle in handles:
        flat = handle.flat_param
        for name, item in zip(flat._fqns, flat._params or (), strict=False):
            if item._backward_hooks or item._post_accumulate_grad_hooks:
                raise ValueError(
                    f"{name} has a hook (register_hook or register_post_accumulate_grad_hook), which fsdp1 "
                    "does not call: gradients are those of a flat parameter. Set fsdp_version=2, which calls "
                    "those of register_hook; or train under DDP."
                )


def drop_stale_hooks(handles: Iterable[Any], model: torch.nn.Module, args: Any) -> None:
    """Drop stale backward hooks of flat parameters that were frozen or unfrozen since.

    Args:
        handles: The handles of the model's flat parameters.
        model: The wrapper; with the first argument bound this is a forward pre-hook.
        args: The arguments of forward.
    """
    for handle in handles:
        flat = handle.flat_param
        waiting = getattr(flat, "_post_backward_hook_state", None)
        is_trained = any(item.requires_grad for item in flat._params or (flat,))
        if waiting is not None and len(waiting) != 1 + is_trained:  # as torch checks after backward
            # The hook's handle is the last entry (torch 2.10 to 2.13); with it gone torch registers a new one
            # in forward.
            waiting[-1].remove()
            del flat._post_backward_hook_state


def _check(handle: Any, lost: list[bool]) -> None:
    if any(lost):
        name = handle.flat_param._fqns[lost.index(True)]
        raise ValueError(
            f"{name} was frozen inside an accumulation window that has gradients of it, which FSDP version 1 "
            "would drop. Freeze it where the window has ended (accelerator.sync_gradients), call zero_grad() "
            "first, or use fsdp_version=2."
        )
