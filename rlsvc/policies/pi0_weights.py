"""The weights of the PI0 family under the names of others: openpi's JAX checkpoints, and LeRobot's PyTorch models.

Here matrices that read the same input are joined and layers are stacked; openpi stacks layers and keeps one axis a
head; LeRobot has one tensor a layer and writes matrices the other way round. Every map is exact, and undone exactly.

Letters: D layers, W width, N heads, K heads of keys and values, H head dimension, M hidden width, C vision width,
P patch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rlsvc.core.errors import UserError
from rlsvc.spec.pi0 import GemmaSpec, Pi0Spec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.spec.value_function import ValueVlmSpec

Weights = Mapping[str, np.ndarray]
Family = Pi0Spec | Pi0FastSpec | ValueVlmSpec
EXPERTS = {"backbone": "", "expert": "_1"}
"""Our experts, and openpi's suffix of each."""
NORMS = {"attention_norm": "pre_attention_norm", "feed_forward_norm": "pre_ffw_norm"}
PROJECTIONS = {
    "pi0": {
        "state_in": "state_proj",
        "action_in": "action_in_proj",
        "action_out": "action_out_proj",
        "time1": "action_time_mlp_in",
        "time2": "action_time_mlp_out",
    },
    "pi05": {
        "action_in": "action_in_proj",
        "action_out": "action_out_proj",
        "time1": "time_mlp_in",
        "time2": "time_mlp_out",
    },
}
"""Our linear maps around the expert, and openpi's and LeRobot's name of each."""
IMAGE, LANGUAGE = "PaliGemma/img", "PaliGemma/llm"
BLOCK = f"{IMAGE}/Transformer/encoderblock"
HEADS = ("query", "key", "value")


class Taken:
    """Our weights, made one by one from theirs.

    Attributes:
        weights: what could be made, by our names.
        used: their names that were read.
    """

    def __init__(self, theirs: Weights) -> None:
        self._theirs = theirs
        self.weights: dict[str, np.ndarray] = {}
        self.used: set[str] = set()

    def __call__(self, name: str, *parts: str, change: Callable[..., np.ndarray] = lambda x: x) -> None:
        """Make the weight `name` of `parts`, if they are there.

        Raises:
            UserError: some of them are there and others are not, or they have other widths than the policy.
        """
        found = [part for part in parts if part in self._theirs]
        if found and len(found) < len(parts):
            absent = next(part for part in parts if part not in self._theirs)
            raise UserError(f"'{found[0]}' is there and '{absent}' is not; both make the weight '{name}'")
        if not found:
            return
        try:
            self.weights[name] = change(*(self._theirs[part] for part in parts))
        except ValueError as error:
            shapes = ", ".join(f"'{part}' {self._theirs[part].shape}" for part in parts[:3])
            raise UserError(f"weight '{name}': {shapes} are of another width than the policy ({error})") from error
        self.used |= set(parts)


def _experts(spec: Family) -> dict[str, tuple[str, GemmaSpec]]:
    """Our experts that this policy has, with openpi's suffix and the size of each."""
    return {name: (suffix, getattr(spec, name)) for name, suffix in EXPERTS.items() if hasattr(spec, name)}


def _projections(spec: Family) -> dict[str, str]:
    return PROJECTIONS[spec.variant] if isinstance(spec, Pi0Spec) else {}


def to_openpi(weights: Weights, spec: Family) -> dict[str, np.ndarray]:
    """Our weights by openpi's names, "PaliGemma/llm/layers/attn/q_einsum/w"."""
    out = _vision_to_openpi(weights, spec)
    out[f"{LANGUAGE}/embedder/input_embedding"] = weights["embedding"]
    for ours, (suffix, size) in _experts(spec).items():
        d, w, n, k, h = size.depth, size.width, size.heads, size.kv_heads, size.head_dim
        at, layers = f"{ours}.layers", f"{LANGUAGE}/layers"
        qkv = weights[f"{at}.qkv"].reshape(d, w, n + 2 * k, h).transpose(0, 2, 1, 3)
        out[f"{layers}/attn/q_einsum{suffix}/w"] = qkv[:, :n]
        out[f"{layers}/attn/kv_einsum{suffix}/w"] = qkv[:, n:].reshape(d, 2, k, w, h)
        out[f"{layers}/attn/attn_vec_einsum{suffix}/w"] = weights[f"{at}.out"].reshape(d, n, h, w)
        gates = weights[f"{at}.gate_up"].reshape(d, w, 2, size.mlp_dim)
        out[f"{layers}/mlp{suffix}/gating_einsum"] = gates.transpose(0, 2, 1, 3)
        out[f"{layers}/mlp{suffix}/linear"] = weights[f"{at}.down"]
        names = {f"{at}.{norm}": f"{layers}/{theirs}{suffix}" for norm, theirs in NORMS.items()}
        for mine, theirs in {**names, f"{ours}.norm": f"{LANGUAGE}/final_norm{suffix}"}.items():
            if f"{mine}_kernel" in weights:
                out[f"{theirs}/Dense_0/kernel"] = weights[f"{mine}_kernel"]
                out[f"{theirs}/Dense_0/bias"] = weights[mine]
            else:
                out[f"{theirs}/scale"] = weights[mine]
    for ours, theirs in _projections(spec).items():
        out |= {f"{theirs}/{part}": weights[f"{ours}.{part}"] for part in ("kernel", "bias")}
    return out


def from_openpi(theirs: Weights, spec: Family) -> Taken:
    """Inverse of `to_openpi`; takes what is there, and leaves out what is not.

    Raises:
        UserError: low-rank weights, which have to be merged first.
    """
    if adapted := next((name for name in theirs if "lora" in name), None):
        raise UserError(f"'{adapted}': an openpi checkpoint with low-rank weights; merge them into the full ones first")
    take = Taken(theirs)
    _take_vision_from_openpi(take, spec)
    take("embedding", f"{LANGUAGE}/embedder/input_embedding")
    for ours, (suffix, size) in _experts(spec).items():
        d, w, n, k, h = size.depth, size.width, size.heads, size.kv_heads, size.head_dim
        at, layers = f"{ours}.layers", f"{LANGUAGE}/layers"

        def join(
            q: np.ndarray, kv: np.ndarray, d: int = d, w: int = w, n: int = n, k: int = k, h: int = h
        ) -> np.ndarray:
            heads = np.concatenate([q.reshape(d, n, w, h), kv.reshape(d, 2 * k, w, h)], axis=1)
            return heads.transpose(0, 2, 1, 3).reshape(d, w, (n + 2 * k) * h)

        attention = f"{layers}/attn"
        take(f"{at}.qkv", f"{attention}/q_einsum{suffix}/w", f"{attention}/kv_einsum{suffix}/w", change=join)
        take(f"{at}.out", f"{attention}/attn_vec_einsum{suffix}/w", change=lambda x, s=(d, n * h, w): x.reshape(s))
        take(
            f"{at}.gate_up",
            f"{layers}/mlp{suffix}/gating_einsum",
            change=lambda x, s=(d, w, 2 * size.mlp_dim): x.transpose(0, 2, 1, 3).reshape(s),
        )
        take(f"{at}.down", f"{layers}/mlp{suffix}/linear")
        names = {f"{at}.{norm}": f"{layers}/{their}{suffix}" for norm, their in NORMS.items()}
        for mine, their in {**names, f"{ours}.norm": f"{LANGUAGE}/final_norm{suffix}"}.items():
            take(mine, f"{their}/scale")
            take(f"{mine}_kernel", f"{their}/Dense_0/kernel")
            take(mine, f"{their}/Dense_0/bias")
    for ours, their in _projections(spec).items():
        for part in ("kernel", "bias"):
            take(f"{ours}.{part}", f"{their}/{part}")
    return take


def _vision_to_openpi(weights: Weights, spec: Family) -> dict[str, np.ndarray]:
    v = spec.vision
    d, c, n, p = v.depth, v.width, v.heads, v.patch
    at = "vision.layers"
    out = {
        f"{IMAGE}/embedding/kernel": weights["vision.patches"].reshape(p, p, 3, c),
        f"{IMAGE}/embedding/bias": weights["vision.patches_bias"],
        f"{IMAGE}/pos_embedding": weights["vision.positions"][None],
    }
    qkv = weights[f"{at}.qkv"].reshape(d, c, 3, n, c // n)
    bias = weights[f"{at}.qkv_bias"].reshape(d, 3, n, c // n)
    for i, name in enumerate(HEADS):
        out[f"{BLOCK}/MultiHeadDotProductAttention_0/{name}/kernel"] = qkv[:, :, i]
        out[f"{BLOCK}/MultiHeadDotProductAttention_0/{name}/bias"] = bias[:, i]
    out[f"{BLOCK}/MultiHeadDotProductAttention_0/out/kernel"] = weights[f"{at}.out"].reshape(d, n, c // n, c)
    out |= {theirs: weights[ours] for ours, theirs in _VISION_ALIKE.items()}
    return out


def _take_vision_from_openpi(take: Taken, spec: Family) -> None:
    v = spec.vision
    d, c, p = v.depth, v.width, v.patch
    take("vision.patches", f"{IMAGE}/embedding/kernel", change=lambda x: x.reshape(p * p * 3, c))
    take("vision.patches_bias", f"{IMAGE}/embedding/bias")
    take("vision.positions", f"{IMAGE}/pos_embedding", change=lambda x: x[0])
    attention = f"{BLOCK}/MultiHeadDotProductAttention_0"
    take(
        "vision.layers.qkv",
        *(f"{attention}/{name}/kernel" for name in HEADS),
        change=lambda *x: np.stack(x, axis=2).reshape(d, c, 3 * c),
    )
    take(
        "vision.layers.qkv_bias",
        *(f"{attention}/{name}/bias" for name in HEADS),
        change=lambda *x: np.stack(x, axis=1).reshape(d, 3 * c),
    )
    take("vision.layers.out", f"{attention}/out/kernel", change=lambda x: x.reshape(d, c, c))
    for ours, their in _VISION_ALIKE.items():
        take(ours, their)


_VISION_ALIKE = {
    "vision.layers.out_bias": f"{BLOCK}/MultiHeadDotProductAttention_0/out/bias",
    "vision.layers.attention_norm": f"{BLOCK}/LayerNorm_0/scale",
    "vision.layers.attention_norm_bias": f"{BLOCK}/LayerNorm_0/bias",
    "vision.layers.feed_forward_norm": f"{BLOCK}/LayerNorm_1/scale",
    "vision.layers.feed_forward_norm_bias": f"{BLOCK}/LayerNorm_1/bias",
    "vision.layers.up": f"{BLOCK}/MlpBlock_0/Dense_0/kernel",
    "vision.layers.up_bias": f"{BLOCK}/MlpBlock_0/Dense_0/bias",
    "vision.layers.down": f"{BLOCK}/MlpBlock_0/Dense_1/kernel",
    "vision.layers.down_bias": f"{BLOCK}/MlpBlock_0/Dense_1/bias",
    "vision.norm": f"{IMAGE}/Transformer/encoder_norm/scale",
    "vision.norm_bias": f"{IMAGE}/Transformer/encoder_norm/bias",
    "vision.head": f"{IMAGE}/head/kernel",
    "vision.head_bias": f"{IMAGE}/head/bias",
}
"""Vision weights of the same shape in openpi."""


# LeRobot

TOWER = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
LEROBOT_EXPERTS = {
    "backbone": "paligemma_with_expert.paligemma.model.language_model",
    "expert": "paligemma_with_expert.gemma_expert.model",
}
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
EMBEDDING = f"{LEROBOT_EXPERTS['backbone']}.embed_tokens.weight"
TIED = ("paligemma_with_expert.paligemma.lm_head.weight",)
"""Names under which LeRobot writes the embedding again."""
UNUSED = ("paligemma_with_expert.gemma_expert.lm_head.weight",)
"""What LeRobot writes and no computation of pi0 reads."""
LEROBOT_NORMS = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
VISION_NORMS = {"attention_norm": "layer_norm1", "feed_forward_norm": "layer_norm2"}


def to_lerobot(weights: Weights, spec: Family) -> dict[str, np.ndarray]:
    """Our weights by LeRobot's names of pi0 and pi05, "model.paligemma_with_expert....q_proj.weight"."""
    out: dict[str, np.ndarray] = {}
    v = spec.vision
    c, p = v.width, v.patch
    patches = weights["vision.patches"].reshape(p, p, 3, c).transpose(3, 2, 0, 1)
    out |= {
        f"{TOWER}.embeddings.patch_embedding.weight": patches,
        f"{TOWER}.embeddings.patch_embedding.bias": weights["vision.patches_bias"],
        f"{TOWER}.embeddings.position_embedding.weight": weights["vision.positions"],
        f"{TOWER}.post_layernorm.weight": weights["vision.norm"],
        f"{TOWER}.post_layernorm.bias": weights["vision.norm_bias"],
        f"{PROJECTOR}.weight": weights["vision.head"].T,
        f"{PROJECTOR}.bias": weights["vision.head_bias"],
        EMBEDDING: weights["embedding"],
    }
    for i in range(v.depth):
        layer = {
            name.removeprefix("vision.layers."): x[i]
            for name, x in weights.items()
            if name.startswith("vision.layers.")
        }
        at = f"{TOWER}.encoder.layers.{i}"
        for j, part in enumerate(("q_proj", "k_proj", "v_proj")):
            out[f"{at}.self_attn.{part}.weight"] = layer["qkv"][:, j * c : (j + 1) * c].T
            out[f"{at}.self_attn.{part}.bias"] = layer["qkv_bias"][j * c : (j + 1) * c]
        for ours, theirs in {"out": "self_attn.out_proj", "up": "mlp.fc1", "down": "mlp.fc2"}.items():
            out[f"{at}.{theirs}.weight"], out[f"{at}.{theirs}.bias"] = layer[ours].T, layer[f"{ours}_bias"]
        for ours, theirs in VISION_NORMS.items():
            out[f"{at}.{theirs}.weight"], out[f"{at}.{theirs}.bias"] = layer[ours], layer[f"{ours}_bias"]
    for ours, (_, size) in _experts(spec).items():
        at = LEROBOT_EXPERTS[ours]
        n, k, h, m = size.heads, size.kv_heads, size.head_dim, size.mlp_dim
        cuts = {"q_proj": (0, n * h), "k_proj": (n * h, (n + k) * h), "v_proj": ((n + k) * h, (n + 2 * k) * h)}
        for i in range(size.depth):
            layer = {
                name.removeprefix(f"{ours}.layers."): x[i]
                for name, x in weights.items()
                if name.startswith(f"{ours}.layers.")
            }
            for part, (start, end) in cuts.items():
                out[f"{at}.layers.{i}.self_attn.{part}.weight"] = layer["qkv"][:, start:end].T
            out[f"{at}.layers.{i}.self_attn.o_proj.weight"] = layer["out"].T
            out[f"{at}.layers.{i}.mlp.gate_proj.weight"] = layer["gate_up"][:, :m].T
            out[f"{at}.layers.{i}.mlp.up_proj.weight"] = layer["gate_up"][:, m:].T
            out[f"{at}.layers.{i}.mlp.down_proj.weight"] = layer["down"].T
            for norm, theirs in LEROBOT_NORMS.items():
                out |= _norm_to_lerobot(f"{at}.layers.{i}.{theirs}", layer[norm], layer.get(f"{norm}_kernel"))
        out |= _norm_to_lerobot(f"{at}.norm", weights[f"{ours}.norm"], weights.get(f"{ours}.norm_kernel"))
    for ours, theirs in _projections(spec).items():
        out[f"{theirs}.weight"], out[f"{theirs}.bias"] = weights[f"{ours}.kernel"].T, weights[f"{ours}.bias"]
    return {f"model.{name}": np.ascontiguousarray(value) for name, value in out.items()}


def _norm_to_lerobot(at: str, weight: np.ndarray, kernel: np.ndarray | None) -> dict[str, np.ndarray]:
    if kernel is None:
        return {f"{at}.weight": weight}
    return {f"{at}.dense.weight": kernel.T, f"{at}.dense.bias": weight}


def from_lerobot(theirs: Weights, spec: Family) -> Taken:
    """Inverse of `to_lerobot`; takes what is there, and leaves out what is not; "model." may be missing.

    Raises:
        UserError: weights for the output of pi0-FAST that are not its embedding.
    """
    flat = {name.removeprefix("model."): value for name, value in theirs.items()}
    for tied in TIED:
        if tied not in flat:
            continue
        flat.setdefault(EMBEDDING, flat[tied])
        # What pi0 says is never read; what pi0-FAST says is its action.
        if isinstance(spec, Pi0FastSpec) and not np.array_equal(flat[tied], flat[EMBEDDING]):
            raise UserError(f"'{tied}' differs from '{EMBEDDING}'; pi0_fast says its tokens by the embedding")
    take = Taken(flat)
    v = spec.vision
    c, p, layers = v.width, v.patch, range(v.depth)

    def stacked(*x: np.ndarray) -> np.ndarray:
        return np.stack([a.T if a.ndim == 2 else a for a in x])

    take(
        "vision.patches",
        f"{TOWER}.embeddings.patch_embedding.weight",
        change=lambda x: x.transpose(2, 3, 1, 0).reshape(p * p * 3, c),
    )
    take("vision.patches_bias", f"{TOWER}.embeddings.patch_embedding.bias")
    take("vision.positions", f"{TOWER}.embeddings.position_embedding.weight")
    take("vision.norm", f"{TOWER}.post_layernorm.weight")
    take("vision.norm_bias", f"{TOWER}.post_layernorm.bias")
    take("vision.head", f"{PROJECTOR}.weight", change=lambda x: x.T)
    take("vision.head_bias", f"{PROJECTOR}.bias")
    take("embedding", EMBEDDING)
    at = f"{TOWER}.encoder.layers"
    for kind, mine in (("weight", ""), ("bias", "_bias")):
        heads = [f"{at}.{i}.self_attn.{part}.{kind}" for i in layers for part in ("q_proj", "k_proj", "v_proj")]
        take(f"vision.layers.qkv{mine}", *heads, change=lambda *x: _joined_thirds(stacked(*x), v.depth))
        parts = {"out": "self_attn.out_proj", "up": "mlp.fc1", "down": "mlp.fc2", **VISION_NORMS}
        for ours, their in parts.items():
            take(f"vision.layers.{ours}{mine}", *(f"{at}.{i}.{their}.{kind}" for i in layers), change=stacked)
    for ours, (_, size) in _experts(spec).items():
        at, depth = LEROBOT_EXPERTS[ours], size.depth

        def each(part: str, at: str = at, depth: int = depth) -> list[str]:
            return [f"{at}.layers.{i}.{part}" for i in range(depth)]

        def joined(*x: np.ndarray, depth: int = depth) -> np.ndarray:
            groups = [x[i * depth : (i + 1) * depth] for i in range(len(x) // depth)]
            return np.stack([np.concatenate([a.T for a in parts], axis=1) for parts in zip(*groups, strict=True)])

        qkv = [name for part in ("q_proj", "k_proj", "v_proj") for name in each(f"self_attn.{part}.weight")]
        take(f"{ours}.layers.qkv", *qkv, change=joined)
        take(f"{ours}.layers.out", *each("self_attn.o_proj.weight"), change=stacked)
        take(f"{ours}.layers.gate_up", *each("mlp.gate_proj.weight"), *each("mlp.up_proj.weight"), change=joined)
        take(f"{ours}.layers.down", *each("mlp.down_proj.weight"), change=stacked)
        for norm, their in LEROBOT_NORMS.items():
            take(f"{ours}.layers.{norm}", *each(f"{their}.weight"), change=stacked)
            take(f"{ours}.layers.{norm}", *each(f"{their}.dense.bias"), change=stacked)
            take(f"{ours}.layers.{norm}_kernel", *each(f"{their}.dense.weight"), change=stacked)
        take(f"{ours}.norm", f"{at}.norm.weight")
        take(f"{ours}.norm", f"{at}.norm.dense.bias")
        take(f"{ours}.norm_kernel", f"{at}.norm.dense.weight", change=lambda x: x.T)
    for ours, their in _projections(spec).items():
        take(f"{ours}.kernel", f"{their}.weight", change=lambda x: x.T)
        take(f"{ours}.bias", f"{their}.bias")
    take.used |= {name for name in (*TIED, *UNUSED) if name in flat}
    names = {name.removeprefix("model."): name for name in theirs}
    take.used = {names[name] for name in take.used if name in names}
    return take


def _joined_thirds(x: np.ndarray, depth: int) -> np.ndarray:
    """[3 D, ..., C] of queries, keys and values in turn to [D, ..., 3 C]."""
    parts = x.reshape(depth, 3, *x.shape[1:])
    return np.concatenate([parts[:, 0], parts[:, 1], parts[:, 2]], axis=-1)
