"""Loaders for Megatron's indexed datasets, and loaders whose batches have all micro-batches of a step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from accel.engines.megatron.runtime import core, parallel_state
from accel_data.loader.base import loader_settings
from accel_ops.trees.send import send_to_device

if TYPE_CHECKING:
    from accel.engines.megatron.plugin import MegatronLMPlugin

_KINDS = {
    "gpt": ("gpt_dataset", "GPTDataset", "GPTDatasetConfig"),
    "bert": ("bert_dataset", "BERTMaskedWordPieceDataset", "BERTMaskedWordPieceDatasetConfig"),
    "t5": ("t5_dataset", "T5MaskedWordPieceDataset", "T5MaskedWordPieceDatasetConfig"),
}


def with_micro_batches(loader: DataLoader[Any], num_micro_batches: int) -> DataLoader[Any]:
    """Return a loader whose batches combine several batches of another one, the micro-batches.

    Args:
        loader: A loader that is not prepared yet.
        num_micro_batches: Micro-batches per step.

    Raises:
        ValueError: If the loader has its own batch sampler.
    """
    if num_micro_batches == 1:
        return loader
    if loader.batch_size is None:
        raise ValueError(
            f"num_micro_batches={num_micro_batches} with a DataLoader that has its own batch_sampler "
            "(or no batch size): its batches cannot be made larger. Set batch_size to that of one "
            "micro-batch."
        )
    size = loader.batch_size * num_micro_batches
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        sampling: dict[str, Any] = {"batch_size": size, "drop_last": loader.drop_last}
    else:
        # The same sampler: the order of samples is the same, only batches are larger.
        sampling = {"batch_sampler": BatchSampler(loader.sampler, size, loader.drop_last)}
    return DataLoader(loader.dataset, **sampling, **loader_settings(loader))


class MegatronLMDummyDataLoader:
    """Placeholder for the loaders of Megatron's indexed datasets.

    Pass it to `prepare` three times: it returns the training loader first, then the validation loader, then
    the test loader.

    Args:
        **dataset_kwargs: "data_path" (prefixes of indexed files, or one), "splits_string" (such as
            "949,50,1"), "seed", "seq_length" (default: the model's), "micro_batch_size", and further fields
            of megatron-core's dataset configuration; "tokenizer" is that of megatron-core.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        # Thousandths of the data for training, validation and test.
        self.dataset_args = {"splits_string": "969,30,1", "seed": 1234} | dataset_kwargs

    def set_megatron_data_args(self) -> dict[str, Any]:
        """Return the arguments of megatron-core's dataset configuration, except the sequence length.

        Raises:
            ValueError: If there is no data_path.
        """
        args = {name: value for name, value in self.dataset_args.items() if name != "micro_batch_size"}
        if "data_path" not in args:
            raise ValueError("MegatronLMDummyDataLoader needs data_path, the prefix of indexed files.")
        paths = args.pop("data_path")
        prefixes = [str(paths)] if not isinstance(paths, (list, tuple)) else [str(path) for path in paths]
        return {
            "blend": (prefixes, None),
            "split": args.pop("splits_string"),
            "random_seed": args.pop("seed"),
            **args,
        }

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any:
        """Return the function that creates the three datasets from their numbers of samples.

        Args:
            accelerator: The Accelerator with its MegatronLMPlugin, whose
                `custom_megatron_datasets_provider_function` takes precedence.
        """
        plugin: MegatronLMPlugin = accelerator.state.megatron_lm_plugin
        if plugin.custom_megatron_datasets_provider_function is not None:
            return plugin.custom_megatron_datasets_provider_function
        args = plugin.megatron_lm_default_args
        module, dataset, config = _KINDS[args["model_type_name"]]

        def provide(numbers: list[int]) -> Any:
            found = core(f"datasets.{module}")
            kind = getattr(found, config)
            options = {"sequence_length": args["seq_length"], **_flags(kind, plugin), **self._renamed()}
            builder = core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
            # The function decides on which ranks datasets are built: on all, as each reads its own samples.
            return builder(getattr(found, dataset), numbers, lambda: True, kind(**options)).build()

        return provide

    def _renamed(self) -> dict[str, Any]:
        options = self.set_megatron_data_args()
        if "seq_length" in options:
            options["sequence_length"] = options.pop("seq_length")
        return options

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Create the three loaders of this process; None for a set without samples.

        Args:
            accelerator: The Accelerator, with its MegatronLMPlugin.

        Raises:
            ValueError: If the length of training is unknown.
        """
        plugin: MegatronLMPlugin = accelerator.state.megatron_lm_plugin
        args = plugin.megatron_lm_default_args
        batch = args["global_batch_size"]
        train = args["train_samples"] or (args["train_iters"] or 0) * batch
        if not train:
            raise ValueError(
                "Megatron's datasets need the number of samples: set MegatronLMPlugin(train_iters=...) or "
                "MegatronLMDummyScheduler(total_num_steps=...)."
            )
        # As in Megatron-LM: one evaluation per interval, and one at the end.
        evaluations = train // (plugin.eval_interval * batch) + 1
        numbers = [train, evaluations * plugin.eval_iters * batch, plugin.eval_iters * batch]
        sets = self.get_train_valid_test_datasets_provider(accelerator)(numbers)
        consumed = plugin.consumed_samples or [0, 0, 0]
        return tuple(  # type: ignore[return-value]
            None if dataset is None else IndexedLoader(dataset, plugin, start, accelerator.device)
            for dataset, start in zip(sets, consumed, strict=True)
        )


class IndexedLoader:
    """This data-parallel rank's batches of an indexed dataset, in its order, which is already shuffled.

    Args:
        dataset: The dataset.
        plugin: The plugin, with the batch sizes.
        consumed: Samples that earlier runs have used.
        device: Device of the batches.
    """

    def __init__(self, dataset: Any, plugin: MegatronLMPlugin, consumed: int, device: torch.device) -> None:
        self.dataset = dataset
        self.size = plugin.global_batch_size
        self.consumed = consumed
        self.device = device

    def __len__(self) -> int:
        return (len(self.dataset) - self.consumed) // self.size

    def skip_first_batches(self, num_batches: int) -> IndexedLoader:
        """Return a copy that starts after this many steps; `accel.skip_first_batches` calls it.

        Args:
            num_batches: Number of batches to skip.
        """
        # A copy: the original loader keeps its position.
        other = copy.copy(self)
        other.consumed += num_batches * self.size
        return other

    def __iter__(self) -> Iterator[Any]:
        """Continue after the consumed samples; each batch has all samples of a step."""
        state = parallel_state()
        batch_size = self.size // state.get_data_parallel_world_size()
        # The samples of a step are consecutive, and each process takes a slice of them.
        first = state.get_data_parallel_rank() * batch_size
        while self.consumed + self.size <= len(self.dataset):
            start = self.consumed + first
            samples = [self.dataset[index] for index in range(start, start + batch_size)]
            # Before the yield: a checkpoint inside the loop counts the batch as consumed.
            self.consumed += self.size
            yield send_to_device(torch.utils.data.default_collate(samples), self.device)


def _flags(kind: Any, plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Settings that a dataset's configuration needs, but that do not depend on the data."""
    names = {field.name for field in dataclasses.fields(kind)}
    values = {
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": bool(plugin.eod_mask_loss),
        # This and the next one as in BERT's paper.
        "masking_probability": 0.15,
        "short_sequence_probability": 0.1,
        "masking_max_ngram": 3,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
        "masking_use_geometric_distribution": plugin.megatron_lm_default_args["model_type_name"] == "t5",
        "classification_head": True,
        "sequence_length_decoder": plugin.megatron_lm_default_args.get("decoder_seq_length"),
    }
    return {name: value for name, value in values.items() if name in names}
