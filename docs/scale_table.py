"""Which models fit on which devices over which mesh: the table of scale.md."""

from accel.estimate.mesh import MeshSizes, mesh_bytes

# The published sizes of Llama 2 7B, Llama 3.1 70B and Llama 3.1 405B.
MODELS = {
    "7B": {"layers": 32, "width": 4096, "inner": 11008, "heads": 32, "groups": 32, "words": 32000},
    "70B": {"layers": 80, "width": 8192, "inner": 28672, "heads": 64, "groups": 8, "words": 128256},
    "405B": {"layers": 126, "width": 16384, "inner": 53248, "heads": 128, "groups": 8, "words": 128256},
}
# dp_replicate, dp_shard, cp, tp
MESHES = {
    "7B": [(1, 1, 1, 1), (1, 8, 1, 1), (1, 16, 1, 1), (8, 8, 1, 1), (64, 16, 1, 1)],
    "70B": [(1, 64, 1, 1), (1, 8, 1, 8), (4, 16, 2, 8), (8, 128, 1, 1), (32, 16, 2, 8)],
    "405B": [(1, 8, 1, 8), (1, 64, 1, 8), (1, 64, 2, 8), (1, 1024, 1, 1), (8, 64, 2, 8)],
}
DEVICES = (24, 40, 80, 141, 192)  # GB of 10^9 bytes


def language_model(
    *, layers: int, width: int, inner: int, heads: int, groups: int, words: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """The parameters of a Llama, and how its tensor-parallel plan splits them.

    Args:
        layers: Number of layers.
        width: Features of a token.
        inner: Features inside the feed-forward layers.
        heads: Heads of queries.
        groups: Heads of keys and of values.
        words: Size of the vocabulary; the output has its own weights.

    Returns:
        Shapes and split dimensions by name, for `mesh_bytes`.
    """
    narrow = width // heads * groups  # grouped-query attention
    rows = {"q_proj": (width, width), "k_proj": (narrow, width), "v_proj": (narrow, width)}
    weights = {f"self_attn.{name}.weight": (shape, 0) for name, shape in rows.items()}
    weights["self_attn.o_proj.weight"] = (width, width), 1
    weights |= {f"mlp.{name}_proj.weight": ((inner, width), 0) for name in ("gate", "up")}
    weights["mlp.down_proj.weight"] = (width, inner), 1
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, width)}
    split = {"model.embed_tokens.weight": 0, "lm_head.weight": 0}
    for layer in range(layers):
        for name, (shape, dim) in weights.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
            split[f"model.layers.{layer}.{name}"] = dim
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (width,)
    return {**shapes, "model.norm.weight": (width,), "lm_head.weight": (words, width)}, split


def rows():
    """Return the lines of the table in Markdown."""
    head = ["model", "parameters", "processes", "replicas x shards x cp x tp", "sharded", "gathered", "all"]
    lines = [[*head, *(f"{device} GB" for device in DEVICES)], ["---"] * (len(head) + len(DEVICES))]
    for name, meshes in MESHES.items():
        shapes, split = language_model(**MODELS[name])
        full = mesh_bytes(shapes, split, MeshSizes()).parameters / 4
        for sizes in meshes:
            mesh = MeshSizes(*sizes)
            needed = mesh_bytes(shapes, split, mesh)
            sums = (needed.total - needed.gathered, needed.gathered, needed.total)
            line = [name, f"{full / 1e9:.2f} billion", str(mesh.processes), " x ".join(map(str, sizes))]
            line += [f"{count / 1e9:.1f}" for count in sums]
            lines.append([*line, *("yes" if needed.total <= size * 1e9 else "-" for size in DEVICES)])
    return ["| " + " | ".join(line) + " |" for line in lines]


print("\n".join(rows()))
