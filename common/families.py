"""What differs between model families, in one short table. Any other model works through its `_no_split_modules` or `--decoder_layer`.

Names are relative to the decoder layer, as transformers 5 builds it. Sources: the modeling files of transformers 5.24.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """Names of the parts of one family's decoder layer."""

    decoder_layer: str = ""  # class name; empty: taken from the model's `_no_split_modules`
    attention: tuple[str, ...] = ("self_attn", "linear_attn")
    experts: str = "mlp.experts"
    router: str = "mlp.gate"
    never_trained: tuple[str, ...] = ()  # regular expressions on parameter names


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family("Qwen3MoeDecoderLayer"),
    "qwen3_next": Family("Qwen3NextDecoderLayer"),
    "qwen3_5_moe_text": Family("Qwen3_5MoeDecoderLayer"),
    # The indexer runs under no_grad in transformers: left trainable it would get zero gradients and weight decay would erode it.
    "glm_moe_dsa": Family("GlmMoeDsaDecoderLayer", attention=("self_attn",), never_trained=(r"\.self_attn\.indexer\.",)),
}
# The checkpoint with a vision tower is trained as its text model; the tower is not loaded, the export copies it from the base.
FAMILIES["qwen3_5_moe"] = FAMILIES["qwen3_5_moe_text"]


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model's config; the generic one for models that are not in the table."""
    return FAMILIES.get(config.model_type, Family())
