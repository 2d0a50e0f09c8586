"""GPT, BERT and T5 models of megatron-core: this process's layers, wrapped for training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel.engines.megatron.arguments import (
    check_names,
    ddp_arguments,
    optimizer_arguments,
    transformer_arguments,
)
from accel.engines.megatron.runtime import core, fields_of, parallel_state
from accel_state.imports.packages import is_package_available

if TYPE_CHECKING:
    from accel.engines.megatron.plugin import MegatronLMPlugin

# Settings that are not fields of the configuration classes.
_READ_HERE = (
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "share_embeddings_and_output_weights",
    "max_position_embeddings",
    "padded_vocab_size",
    "seq_length",
    "decoder_seq_length",
    "bert_binary_head",
    "num_tokentypes",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "lr_wsd_decay_style",
)


def check_other_arguments(settings: Mapping[str, Any]) -> None:
    """Reject `other_megatron_args` that nothing reads.

    Args:
        settings: Settings by Megatron-LM's names.

    Raises:
        ValueError: If there are any; the message suggests the closest name.
    """
    kinds = (
        core("transformer").TransformerConfig,
        core("optimizer").OptimizerConfig,
        core("distributed").DistributedDataParallelConfig,
    )
    check_names(settings, *(fields_of(kind) for kind in kinds), _READ_HERE)


def transformer_config(args: Mapping[str, Any]) -> Any:
    """Make megatron-core's configuration of a model.

    Args:
        args: Settings by Megatron-LM's names.

    Raises:
        ValueError: If the attention kernel is unknown, or layers cannot be cut into pipeline stages.
    """
    kind = core("transformer").TransformerConfig
    found = transformer_arguments(args, fields_of(kind))
    if args.get("attention_backend") is not None:
        backends = core("transformer.enums").AttnBackend
        if args["attention_backend"] not in backends.__members__:
            raise ValueError(
                f"attention_backend={args['attention_backend']!r} is unknown; allowed: "
                f"{', '.join(backends.__members__)}."
            )
        found["attention_backend"] = backends[args["attention_backend"]]
    return kind(**found)


def build(plugin: MegatronLMPlugin) -> list[Any]:
    """Create this process's chunks of a model: one, or several with virtual pipeline stages.

    Args:
        plugin: The plugin, after it has been set up for the model.
    """
    args = plugin.megatron_lm_default_args
    state = parallel_state()
    config = transformer_config(args)
    model_chunks = []
    stages = config.virtual_pipeline_model_parallel_size
    state.set_virtual_pipeline_model_parallel_world_size(stages)  # depends on the model
    for stage in range(stages or 1):
        # megatron-core ignores virtual stages unless it is told to count them.
        place = {"ignore_virtual": False, "vp_stage": stage if stages else None}
        ends = state.is_pipeline_first_stage(**place), state.is_pipeline_last_stage(**place)
        if plugin.custom_model_provider_function is not None:
            chunk: Any = plugin.custom_model_provider_function(*ends)
        else:
            chunk = _PROVIDERS[args["model_type_name"]](args, config, *ends, place["vp_stage"])
        model_chunks.append(chunk)
    if plugin.custom_prepare_model_function is not None:
        model_chunks = plugin.custom_prepare_model_function(model_chunks)
    return model_chunks


def wrap(model_chunks: list[Any], args: Mapping[str, Any], device: torch.device) -> list[Any]:
    """Place the chunks of a model, and wrap them in megatron-core's mixed precision and data parallelism.

    Args:
        model_chunks: The chunks.
        args: Settings by Megatron-LM's names.
        device: Device of the weights.
    """
    distributed = core("distributed")
    kind = distributed.DistributedDataParallelConfig
    ddp_config = kind(**ddp_arguments(args, fields_of(kind)))
    container = distributed.DistributedDataParallel
    if ddp_config.use_megatron_fsdp:
        container = core("distributed.fsdp.mcore_fsdp_adapter").FullyShardedDataParallel
    wrapped = []
    for index, chunk in enumerate(model_chunks):
        chunk = chunk.to(device)
        if args.get("fp16") or args.get("bf16"):
            chunk = core("transformer.module").Float16Module(chunk.config, chunk)
        # megatron-core's own DDP; buckets of later virtual stages are not overlapped, as in Megatron-LM.
        chunk = container(chunk.config, ddp_config, chunk, disable_bucketing=index > 0)
        if not ddp_config.use_megatron_fsdp:
            # Data-parallel replicas start from the first one's weights.
            chunk.broadcast_params()
        wrapped.append(chunk)
    return wrapped


def optimizer_config(args: Mapping[str, Any]) -> Any:
    """Make megatron-core's configuration of an optimizer.

    Args:
        args: Settings by Megatron-LM's names.
    """
    kind = core("optimizer").OptimizerConfig
    # Only fields that this version of megatron-core has: they differ between releases.
    return kind(**optimizer_arguments(args, fields_of(kind)))


def _embeddings(args: Mapping[str, Any]) -> dict[str, Any]:
    names = ("position_embedding_type", "rotary_percent", "share_embeddings_and_output_weights")
    return {name: args[name] for name in names if args.get(name) is not None}


def _sizes(args: Mapping[str, Any], pre_process: bool, post_process: bool) -> dict[str, Any]:
    return {
        "vocab_size": args["padded_vocab_size"],
        "max_sequence_length": args["max_position_embeddings"],
        "pre_process": pre_process,
        "post_process": post_process,
    }


def _gpt(
    args: Mapping[str, Any], config: Any, pre_process: bool, post_process: bool, stage: int | None
) -> Any:
    spec = core("models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=is_package_available("transformer_engine"),
        normalization=config.normalization,
        vp_stage=stage,
    )
    rotary = {"rotary_base": args["rotary_base"]} if args.get("rotary_base") is not None else {}
    model = core("models.gpt").GPTModel
    sizes = _sizes(args, pre_process, post_process)
    return model(config, transformer_layer_spec=spec, vp_stage=stage, **sizes, **_embeddings(args), **rotary)


def _bert(
    args: Mapping[str, Any], config: Any, pre_process: bool, post_process: bool, stage: int | None
) -> Any:
    if not args["pretraining_flag"]:
        raise ValueError(
            "A BERT model with a head for classification: megatron-core only has BERT for pretraining. Set "
            "MegatronLMPlugin(custom_model_provider_function=...), or train with ParallelismConfig."
        )
    return core("models.bert.bert_model").BertModel(
        config,
        num_tokentypes=args["num_tokentypes"] if args["bert_binary_head"] else 0,
        transformer_layer_spec=core("models.bert.bert_layer_specs").bert_layer_local_spec,
        add_binary_head=args["bert_binary_head"],
        vp_stage=stage,
        **_sizes(args, pre_process, post_process),
        **_embeddings(args),
    )


def _t5(
    args: Mapping[str, Any], config: Any, pre_process: bool, post_process: bool, stage: int | None
) -> Any:
    if config.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"pp_degree={config.pipeline_model_parallel_size} with a T5 model is not supported: use "
            "pp_degree=1 and tp_degree."
        )
    specs = core("models.T5.t5_spec")
    encoder = transformer_config({**args, "num_layers": args["encoder_num_layers"]})
    return core("models.T5").T5Model(
        config,
        encoder,
        specs.get_t5_encoder_with_local_block_spec(encoder.num_layers),
        specs.get_t5_decoder_with_local_block_spec(config.num_layers),
        **_sizes(args, pre_process, post_process),
        **_embeddings(args),
    )


_PROVIDERS = {"gpt": _gpt, "bert": _bert, "t5": _t5}
