"""Every way to hand parameters, optimizers or gradients over works after an evaluation as before one.

A forward pass without a backward pass leaves full parameters in a sharded model; each entry point has to
reach the shards all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.utils import broadcast_object_list
from accel_optim.handlers import GradScalerKwargs
from accel_state.parallelism.config import ParallelismConfig

FSDP = FullyShardedDataParallelPlugin
SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}
ENGINES = {
    "single": lambda wrapped: {},
    "fsdp2": lambda wrapped: {"fsdp_plugin": FSDP(fsdp_version=2, **SHARDED, **_policy(wrapped))},
    "fsdp2, whole states": lambda wrapped: {
        "fsdp_plugin": FSDP(fsdp_version=2, state_dict_type="FULL_STATE_DICT", **_policy(wrapped))
    },
    "fsdp2, gathered": lambda wrapped: {
        "fsdp_plugin": FSDP(fsdp_version=2, reshard_after_forward=False, **_policy(wrapped))
    },
    "hsdp": lambda wrapped: {
        "parallelism_config": ParallelismConfig(dp_shard_size=2),
        "fsdp_plugin": FSDP(fsdp_version=2, **SHARDED, **_policy(wrapped)),
    },
    "fsdp1": lambda wrapped: {"fsdp_plugin": FSDP(fsdp_version=1, use_orig_params=True, **_policy(wrapped))},
}


def _policy(wrapped: bool) -> dict[str, Any]:
    if not wrapped:
        return {"auto_wrap_policy": "no_wrap"}
    return {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data + self.linear(data).tanh()


class Net(torch.nn.Module):
    """Blocks, which may be sharded separately, and a head, which lies in the root's group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(4, 2)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            data = block(data)
        return self.head(data)


PARTS: dict[str, Callable[[Any], list[torch.nn.Parameter]]] = {
    "root": lambda net: list(net.head.parameters()),
    "blocks": lambda net: list(net.blocks.parameters()),
    "both": lambda net: list(net.parameters()),
}


class Session:
    """A training of which an optimizer has some parameters; the others are not trained."""

    def __init__(self, engine: str, part: str, wrapped: bool, folder: str, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **ENGINES[engine](wrapped), **options)
        self.part, self.folder = PARTS[part], folder
        net = Net()
        self.optimizer: Any = torch.optim.AdamW(self.part(net), lr=0.05)
        self.model, self.optimizer = self.accelerator.prepare(net, self.optimizer)
        self.norms: list[float] = []

    @property
    def net(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def data(self) -> torch.Tensor:
        rank, size = self.accelerator.engine.data_parallel.rank_and_size
        return torch.linspace(-1, 1, 32).view(8, 4).chunk(size)[rank]

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(self.data())

    def backward(self) -> None:
        self.accelerator.backward(self.model(self.data()).square().mean())

    def step(self) -> None:
        self.norms.append(float(self.accelerator.clip_grad_norm_(self.part(self.net), 0.1)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad()


def new_optimizer(session: Session) -> None:
    session.optimizer = session.accelerator.prepare(torch.optim.SGD(session.part(session.net), lr=0.1))


def add_group(session: Session) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    session.optimizer = session.accelerator.prepare(optimizer)
    session.optimizer.add_param_group({"params": session.part(session.net), "lr": 0.2})


def add_named_group(session: Session) -> None:
    optimizer = torch.optim.SGD([("other", torch.zeros(1, requires_grad=True))], lr=0.1)
    session.optimizer = session.accelerator.prepare(optimizer)
    named = [(f"parameter {n}", item) for n, item in enumerate(session.part(session.net))]
    session.optimizer.add_param_group({"params": named, "lr": 0.2})


def freeze_and_unfreeze(session: Session) -> None:
    for item in session.part(session.net):
        item.requires_grad_(False)
    session.evaluate()
    for item in session.part(session.net)[:2]:
        item.requires_grad_(True)


def freeze_what_a_dropped_loss_left(session: Session) -> None:
    """A forward pass with gradients, as in a validation without no_grad, then freezing and unfreezing."""
    session.model(session.data())
    for item in session.part(session.net):
        item.requires_grad_(False)
    session.optimizer.step()  # of nothing
    session.model(session.data())
    for item in session.part(session.net)[:2]:
        item.requires_grad_(True)


def save_and_load(session: Session) -> None:
    session.accelerator.save_state(session.folder)
    session.backward()
    session.step()
    session.evaluate()
    session.accelerator.load_state(session.folder)


def prepare_again(session: Session) -> None:
    net = session.model if session.accelerator.engine.name == "fsdp1" else session.net
    session.accelerator.free_memory()
    optimizer = torch.optim.SGD(session.part(net), lr=0.1)
    session.model, session.optimizer = session.accelerator.prepare(net, optimizer)


def clip_by_value(session: Session) -> None:
    session.backward()
    session.evaluate()
    session.accelerator.clip_grad_value_(session.part(session.net), 0.01)
    session.optimizer.step()
    session.optimizer.zero_grad()
    session.model.zero_grad()


def clip_after_evaluation(session: Session) -> None:
    session.backward()
    session.evaluate()
    session.step()


def drop_gradients(session: Session) -> None:
    session.backward()
    session.evaluate()
    session.optimizer.zero_grad()
    session.model.zero_grad()


def whole_state(session: Session) -> None:
    state = session.accelerator.get_state_dict(session.model)  # on the first process alone, where sharded
    norm = float(sum(value.double().square().sum() for value in state.values()))
    session.norms.append(broadcast_object_list([norm])[0])


def unscale(session: Session) -> None:
    session.backward()
    session.evaluate()
    session.accelerator.unscale_gradients(session.optimizer)
    session.optimizer.step()
    session.optimizer.zero_grad()
    session.model.zero_grad()


ENTRY_POINTS = {
    function.__name__: function
    for function in (
        new_optimizer,
        add_group,
        add_named_group,
        freeze_and_unfreeze,
        freeze_what_a_dropped_loss_left,
        save_and_load,
        prepare_again,
        clip_by_value,
        clip_after_evaluation,
        drop_gradients,
        whole_state,
        unscale,
    )
}


def run(engine: str, entry: str, part: str, wrapped: bool, evaluates: bool, folder: str) -> list[float]:
    options = {}
    if entry == "unscale":
        scaler = GradScalerKwargs(init_scale=64.0)
        options = {"mixed_precision": "fp16", "kwargs_handlers": [scaler]}
    session = Session(engine, part, wrapped, folder, **options)
    session.backward()
    session.step()
    if evaluates:
        session.evaluate()
    try:
        ENTRY_POINTS[entry](session)
    except ValueError as error:
        if "flattens into one vector, and torch saves the state of all" in str(error):
            return []
        raise
    for _ in range(2):
        session.backward()
        session.step()
    return session.norms


@pytest.mark.filterwarnings("ignore:.*not prepared:UserWarning")
@pytest.mark.parametrize(
    ("engine", "entry"),
    [
        (engine, entry)
        for engine in ENGINES
        for entry in ENTRY_POINTS
        # torch's FSDP version 1 fails in backward where it had hooked what is frozen now.
        if engine != "single" and (engine, entry) != ("fsdp1", "freeze_what_a_dropped_loss_left")
    ],
)
def test_an_entry_point_reaches_the_shards(world, tmp_path, engine, entry):
    for part in PARTS:
        for wrapped in (False, True):
            place = str(tmp_path / f"{part} {wrapped}")
            expected = world.run(run, "single", entry, part, wrapped, False, f"{place} one", size=1)[0]
            for evaluates in (False, True):
                found = world.run(run, engine, entry, part, wrapped, evaluates, f"{place} {evaluates}")
                # An optimizer with a part of a flat parameter cannot be saved.
                if (engine, entry, wrapped) == ("fsdp1", "save_and_load", False) and part != "both":
                    assert found == [[], []]
                    continue
                for norms in found:
                    assert norms == pytest.approx(expected, rel=2e-2 if entry == "unscale" else 1e-4), (
                        part,
                        wrapped,
                        evaluates,
                    )
