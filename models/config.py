"""What a GLM-5.2 network is, read from a Hugging Face `config.json`.

Every number that shapes an array is read here and nowhere else; a shape-bearing key that is not known is refused
rather than ignored, because ignoring one gives a network that runs and is wrong.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from dcpjax.errors import ConfigError
from models.keys import Reader, number, token_ids
from models.quantconfig import quantization_of
from models.tensorfile import unique


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """The DSA indexer of a full layer: `num_heads` queries of `head_dim` values, `topk` positions kept. norm_eps: of
    its keys' LayerNorm. Source: DeepSeek-V3.2."""

    num_heads: int
    head_dim: int
    topk: int
    norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Routed experts of `width`; `shared_width` is the width of all shared experts together.

    experts_per_token: chosen, from the `groups_per_token` best of `num_groups`. norm_topk: whether their weights are
    made to sum to 1. scale: of the weights, after that. Source: DeepSeek-V3 (section 2.1.2).
    """

    num_experts: int
    experts_per_token: int
    width: int
    shared_width: int
    num_groups: int
    groups_per_token: int
    norm_topk: bool
    scale: float


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A layer with its own indexer is `full`; one that reuses the selection before it is not. sparse: has experts."""

    full: bool
    sparse: bool


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of one checkpoint. Frozen and hashable: a static argument of every jitted function.

    q_rank, kv_rank: values of the low-rank query and of the latent. nope_dim, rope_dim, v_dim: values of a head's query
    and key that are not rotated, that are, and of its value. dense_width: of a dense layer's SwiGLU. norm_eps, latent_norm_eps:
    of the layers' norms and of the two latent ones. max_position: tokens of the longest sequence. indexer, moe: of all
    layers that have them. has_mtp: whether there is a draft layer. share_selection: whether its later iterations keep
    the first one's selection.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    dense_width: int
    rope_theta: float
    norm_eps: float
    latent_norm_eps: float
    max_position: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    layers: tuple[LayerKind, ...]
    indexer: IndexerConfig
    moe: MoeConfig
    has_mtp: bool
    share_selection: bool

    @property
    def num_layers(self) -> int:
        """Decoder layers of the target."""
        return len(self.layers)

    @property
    def num_full_layers(self) -> int:
        """Those of them that select."""
        return sum(kind.full for kind in self.layers)

    @property
    def qk_dim(self) -> int:
        """Values of a head's query and expanded key."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_width(self) -> int:
        """Values cached per token and layer: the normed latent, then the rotated key."""
        return self.kv_rank + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of the attention's scores."""
        return self.qk_dim**-0.5

    @property
    def blocks(self) -> tuple[tuple[tuple[LayerKind, ...], int], ...]:
        """Runs of equal blocks `(kinds, repeats)`; a block is a full layer and those that reuse its selection."""
        starts = [i for i, kind in enumerate(self.layers) if kind.full] + [self.num_layers]
        runs: list[tuple[tuple[LayerKind, ...], int]] = []
        for start, stop in itertools.pairwise(starts):
            block = self.layers[start:stop]
            if runs and runs[-1][0] == block:
                runs[-1] = (block, runs[-1][1] + 1)
            else:
                runs.append((block, 1))
        return tuple(runs)


# Keys whose value sizes no array here, or repeats another key's. `head_dim` is a trap: in the published file it is
# neither the query/key width nor the value width.
_IGNORED = frozenset(
    (
        "architectures",
        "dtype",
        "torch_dtype",
        "attention_dropout",
        "use_cache",
        "transformers_version",
        "head_dim",
        "num_key_value_heads",
        "quantization_config",
        "pretraining_tp",
        "ep_size",
        "moe_layer_freq",
        "initializer_range",
        "bos_token_id",
        "moe_router_dtype",
        "router_dtype",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "num_experts",
        "_name_or_path",
        "auto_map",
        "problem_type",
        "id2label",
        "label2id",
        "is_encoder_decoder",
        "chunk_size_feed_forward",
        "output_router_logits",
        "max_window_layers",
        "seq_aux",
        "aux_loss_alpha",
        "topk_method",
    )
)

_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("glm_moe_dsa",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_interleave": (True,),
    "indexer_rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "num_nextn_predict_layers": (0, 1),
}


def from_hf(raw: dict[str, Any], overrides: dict[str, Any] | None = None) -> ModelConfig:
    """Builds a `ModelConfig` from the mapping in `config.json`, with `overrides` laid over it.

    `latent_norm_eps` is our own key (the epsilon of the two latent norms; default: `rms_norm_eps`).
    Raises `ConfigError` for a missing key, an unsupported value or an unknown key that could size an array.
    """
    if not isinstance(overrides or {}, Mapping):
        raise ConfigError(f"hf_overrides = {overrides!r:.200} must be a mapping of config.json's keys")
    read = Reader({**raw, **(overrides or {})})
    quantization_of(read.raw)
    read.need("model_type")
    for key, allowed in _FIXED.items():
        value = read.get(key, allowed[0])
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise ConfigError(f"config.json: {key} = {value!r} is not supported; allowed: {list(allowed)}")

    num_layers = read.size("num_hidden_layers")
    rope = read.mapping("rope_parameters")
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"config.json: rope_type {rope['rope_type']!r} is not supported; use 'default'")
    theta = rope.get("rope_theta", read.get("rope_theta"))
    if theta is None:
        raise ConfigError("config.json has no rope_theta; glm_moe_dsa has no default for it")
    nope, rot = read.size("qk_nope_head_dim"), read.size("qk_rope_head_dim")
    if read.get("qk_head_dim", nope + rot) != nope + rot:
        raise ConfigError(f"config.json: qk_head_dim must be qk_nope_head_dim + qk_rope_head_dim = {nope + rot}")
    num_experts, num_groups = read.size("n_routed_experts"), read.size("n_group", 1)
    if num_experts % num_groups:
        raise ConfigError(f"config.json: n_group {num_groups} must divide n_routed_experts {num_experts}")
    width = read.size("moe_intermediate_size")
    eps = read.number("rms_norm_eps", 1e-5)
    full, sparse = _full_layers(read, num_layers), _sparse_layers(read, num_layers)
    vocab_size = read.size("vocab_size")
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=read.size("hidden_size"),
        num_heads=read.size("num_attention_heads"),
        q_rank=read.size("q_lora_rank"),
        kv_rank=read.size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rot,
        v_dim=read.size("v_head_dim"),
        dense_width=read.size("intermediate_size"),
        rope_theta=number("rope_theta", theta),
        norm_eps=eps,
        latent_norm_eps=read.number("latent_norm_eps", eps),
        max_position=read.size("max_position_embeddings"),
        eos_token_ids=token_ids("config.json", "eos_token_id", read.get("eos_token_id", ()), vocab_size),
        pad_token_id=read.size("pad_token_id", 0, least=0),
        layers=tuple(LayerKind(full=f, sparse=s) for f, s in zip(full, sparse)),
        indexer=IndexerConfig(
            num_heads=read.size("index_n_heads"),
            head_dim=read.size("index_head_dim"),
            topk=read.size("index_topk"),
        ),
        moe=MoeConfig(
            num_experts=num_experts,
            experts_per_token=read.size("num_experts_per_tok"),
            width=width,
            shared_width=width * read.size("n_shared_experts", 1),
            num_groups=num_groups,
            groups_per_token=read.size("topk_group", 1),
            norm_topk=read.truth("norm_topk_prob", True),
            scale=read.number("routed_scaling_factor", 1.0),
        ),
        has_mtp=read.get("num_nextn_predict_layers", 0) == 1,
        share_selection=read.truth("index_share_for_mtp_iteration", False),
    )
    _refuse_unknown(read, overrides or {})
    _check(config)
    return config


def _full_layers(read: Reader, num_layers: int) -> list[bool]:
    """Which layers own an indexer: `indexer_types`, else the F/S pattern, else frequency and offset."""
    types, pattern = read.words("indexer_types"), read.words("index_topk_pattern")
    freq, offset = read.size("index_topk_freq", 1), read.size("index_skip_topk_offset", 2, least=0)
    if types is not None:
        full = [t == "full" for t in types]
        bad = [t for t in types if t not in ("full", "shared")]
    elif pattern is not None:
        full = [t == "F" for t in pattern]
        bad = [t for t in pattern if t not in "FS"]
    else:
        full = [max(i - offset + 1, 0) % freq == 0 for i in range(num_layers)]
        bad = []
    if bad or len(full) != num_layers or not full[0]:
        raise ConfigError(
            "config.json: the indexer pattern must name 'full' or 'shared' for each of the "
            f"{num_layers} layers, and layer 0 must be full; got {(types or pattern)!r}"
        )
    return full


def _sparse_layers(read: Reader, num_layers: int) -> list[bool]:
    """Which layers hold experts: `mlp_layer_types`, else all from `first_k_dense_replace` on."""
    types, first = read.words("mlp_layer_types"), read.size("first_k_dense_replace", 0, least=0)
    sparse = [t == "sparse" for t in types] if types is not None else [i >= first for i in range(num_layers)]
    if len(sparse) != num_layers or any(t not in ("dense", "sparse") for t in types or ()):
        raise ConfigError(
            f"config.json: mlp_layer_types must name 'dense' or 'sparse' for each of the {num_layers} layers"
        )
    return sparse


def _refuse_unknown(read: Reader, overrides: dict[str, Any]) -> None:
    left = {k: v for k, v in read.raw.items() if k not in read.seen and k not in _IGNORED}
    shaping = sorted(k for k, v in left.items() if k in overrides or _sizes_an_array(v))
    if shaping:
        raise ConfigError(
            f"unknown configuration keys {shaping}: they may change the network's shape. Remove them if they do not"
        )


def _sizes_an_array(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_sizes_an_array(v) for v in value)
    if isinstance(value, dict):
        return any(_sizes_an_array(v) for v in value.values())
    return isinstance(value, int) and not isinstance(value, bool)


def _check(config: ModelConfig) -> None:
    moe = config.moe
    if config.rope_dim % 2 or config.indexer.head_dim < config.rope_dim:
        raise ConfigError(
            f"config.json: qk_rope_head_dim {config.rope_dim} must be even and at most "
            f"index_head_dim {config.indexer.head_dim}"
        )
    if moe.groups_per_token > moe.num_groups or moe.experts_per_token > (
        moe.num_experts // moe.num_groups * moe.groups_per_token
    ):
        raise ConfigError(
            f"config.json: {moe.experts_per_token} experts per token cannot be chosen from "
            f"{moe.groups_per_token} of {moe.num_groups} groups of {moe.num_experts // moe.num_groups} experts"
        )


def read_config(folder: str | pathlib.Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """Reads `folder/config.json` (eos ids also from `generation_config.json`, which wins as in the peers)."""
    folder = pathlib.Path(folder)
    raw = read_raw(folder)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = read_mapping(generation).get("eos_token_id")
        if eos is not None:
            size = Reader({**raw, **(overrides or {})}).size("vocab_size")
            raw["eos_token_id"] = list(token_ids("generation_config.json", "eos_token_id", eos, size))
    return from_hf(raw, overrides)


def read_raw(where: pathlib.Path) -> dict[str, Any]:
    """The mapping in a `config.json`, or in that of a folder. Raises `ConfigError`."""
    path = where / "config.json" if where.is_dir() else where
    if not path.is_file():
        raise ConfigError(f"{where} has no config.json; give a folder with a glm_moe_dsa checkpoint")
    return read_mapping(path)


def read_mapping(path: pathlib.Path) -> dict[str, Any]:
    """The mapping in a JSON file, its keys unique. Raises `ConfigError`."""
    try:
        raw = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {str(error) or type(error).__name__}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping, not a {type(raw).__name__}")
    return raw
