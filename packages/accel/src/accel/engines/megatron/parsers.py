"""Megatron-LM's arguments from a model's configuration: one function per kind of model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Parser = Callable[[Any, Any, Any], dict[str, Any]]

_PARSERS: dict[str, Parser] = {}


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Decorate a function that translates the configuration of a kind of model to Megatron-LM.

    Args:
        model_type: The `model_type` of their configuration.

    Returns:
        A decorator for a function `(plugin, model, batch_data)` that returns settings by Megatron-LM's names.
        They must contain "model_type_name" ("gpt", "bert" or "t5"), the sizes ("num_layers", "hidden_size",
        "num_attention_heads", "max_position_embeddings", "padded_vocab_size" ...) and "seq_length".
    """

    def register(parser: Parser) -> Parser:
        _PARSERS[model_type] = parser
        return parser

    return register


def parse_model_config(plugin: Any, model: torch.nn.Module, batch_data: Any) -> dict[str, Any]:
    """Translate a model's configuration to Megatron-LM's names.

    Args:
        plugin: The plugin, whose settings take precedence.
        model: A model with a configuration as in transformers.
        batch_data: A batch, or None.

    Raises:
        ValueError: If its kind is unknown; the message lists the supported ones.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in _PARSERS:
        raise ValueError(
            f"{type(model).__name__} (model_type {kind!r}) is not supported under Megatron-LM; supported: "
            f"{', '.join(sorted(_PARSERS))}. Describe it with add_model_config_to_megatron_parser, or give "
            "MegatronLMPlugin(custom_model_provider_function=...)."
        )
    found = _PARSERS[kind](plugin, model, batch_data)
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(plugin, name) is not None:
            found[name] = getattr(plugin, name)
    if plugin.use_rotary_position_embeddings is not None:
        rotary = plugin.use_rotary_position_embeddings
        found["position_embedding_type"] = "rope" if rotary else "learned_absolute"
    return found


def _padded(vocab_size: int, plugin: Any) -> int:
    """The vocabulary made divisible for tensor parallelism, as Megatron-LM does (128 per process)."""
    # 128 is Megatron-LM's default for make_vocab_size_divisible_by; checkpoints depend on it.
    multiple = 128 * (plugin.tp_degree or 1)
    return -(-vocab_size // multiple) * multiple


def _length(plugin: Any, batch_data: Any, longest: int) -> int:
    if plugin.seq_length is not None:
        return int(plugin.seq_length)
    if batch_data is not None:
        return int(batch_data["input_ids"].shape[1])
    return longest


@add_model_config_to_megatron_parser("gpt2")
def _gpt2(plugin: Any, model: Any, batch_data: Any) -> dict[str, Any]:
    config = model.config
    return {
        "model_type_name": "gpt",
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        # None means four times the hidden size in transformers' GPT-2.
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "max_position_embeddings": config.n_positions,
        "padded_vocab_size": _padded(config.vocab_size, plugin),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "attention_dropout": config.attn_pdrop,
        "hidden_dropout": config.resid_pdrop,
        "init_method_std": config.initializer_range,
        "seq_length": _length(plugin, batch_data, config.n_positions),
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }


@add_model_config_to_megatron_parser("llama")
def _llama(plugin: Any, model: Any, batch_data: Any) -> dict[str, Any]:
    config = model.config
    # In it since transformers 5, next to it in older versions.
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    return {
        "model_type_name": "gpt",
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "ffn_hidden_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "padded_vocab_size": _padded(config.vocab_size, plugin),
        "layernorm_epsilon": config.rms_norm_eps,
        "attention_dropout": config.attention_dropout,
        # Llama has dropout only in attention.
        "hidden_dropout": 0.0,
        "init_method_std": config.initializer_range,
        "seq_length": _length(plugin, batch_data, config.max_position_embeddings),
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": theta or getattr(config, "rope_theta", 10000.0),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "swiglu": True,
        "add_bias_linear": False,
    }


@add_model_config_to_megatron_parser("megatron-bert")
def _bert(plugin: Any, model: Any, batch_data: Any) -> dict[str, Any]:
    config = model.config
    kind = type(model).__name__.lower()
    return {
        "model_type_name": "bert",
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "padded_vocab_size": _padded(config.vocab_size, plugin),
        "layernorm_epsilon": config.layer_norm_eps,
        "attention_dropout": config.attention_probs_dropout_prob,
        "hidden_dropout": config.hidden_dropout_prob,
        "init_method_std": config.initializer_range,
        "seq_length": _length(plugin, batch_data, config.max_position_embeddings),
        "num_labels": config.num_labels,
        "num_tokentypes": config.type_vocab_size,
        # By the class's name, as the configuration does not name the task.
        "pretraining_flag": "pretraining" in kind or "maskedlm" in kind,
        "bert_binary_head": "pretraining" in kind,
        "share_embeddings_and_output_weights": True,
    }


@add_model_config_to_megatron_parser("t5")
def _t5(plugin: Any, model: Any, batch_data: Any) -> dict[str, Any]:
    config = model.config
    return {
        "model_type_name": "t5",
        "num_layers": config.num_decoder_layers,
        "encoder_num_layers": config.num_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "kv_channels": config.d_kv,
        "ffn_hidden_size": config.d_ff,
        # May be missing in configurations of T5, whose positions are relative.
        "max_position_embeddings": config.n_positions if hasattr(config, "n_positions") else 512,
        "padded_vocab_size": _padded(config.vocab_size, plugin),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "attention_dropout": config.dropout_rate,
        "hidden_dropout": config.dropout_rate,
        "init_method_std": config.initializer_factor * 0.02,
        "seq_length": plugin.encoder_seq_length or _length(plugin, batch_data, 512),
        "decoder_seq_length": plugin.decoder_seq_length or 128,
        "share_embeddings_and_output_weights": True,
    }
