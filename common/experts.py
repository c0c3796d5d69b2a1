"""Training some experts of a layer exactly: trained and frozen experts as parts with weights of their own; and which experts to train.

    python -m common.experts count --config sft/configs/qwen3_235b_experts.yaml --output counts.json      (under torchrun for a large model)
    python -m common.experts select --counts counts.json --top_k 8 --scope layer --by count --output mask.json

`count` runs the base model over the config's training data and writes how many tokens, and with how much weight, each expert received.
`select` proposes a mask from it: mask.json `{"layer": [expert, ...]}` for `expert_mask`, mask.stats.json with what was chosen and how much of
the routing it covers, and mask.png, a heat map. Exit codes: 0 good, 2 wrong use.
"""

import argparse
import copy
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

# ----------------------------------------------------------------------------------------------------------------------------------
# Experts in parts


class SplitExperts(nn.Module):
    """Fused experts [E, ...] cut into parts that are modules (and FSDP units) of their own; computes what the whole would.

    Each part is an instance of the model's own experts class with fewer experts. A part receives just the (token, expert) pairs that are
    routed to it, one row each, so that nothing is computed twice; the results are brought back into the tokens' order, weighted and summed
    as transformers does it.
    """

    def __init__(self, experts: nn.Module, trained: Iterable[int], num_units: int = 1):
        """trained: ids of the experts that train. num_units: into how many units all E experts would be cut."""
        super().__init__()
        tensors = {name: parameter for name, parameter in experts._parameters.items() if parameter is not None}
        self.num_experts = next(iter(tensors.values())).shape[0]
        trained = sorted(trained)
        size = -(-self.num_experts // num_units)
        self.ids: dict[str, tuple[int, ...]] = {}  # name of the part -> experts in it
        frozen = sorted(set(range(self.num_experts)) - set(trained))
        for kind, ids in (("frozen", frozen), ("trained", trained)):
            for number, first in enumerate(range(0, len(ids), size)):
                self.ids[f"{kind}{number}"] = tuple(ids[first : first + size])
        for name, ids in self.ids.items():
            part = copy.copy(experts)  # class, activation, config are shared
            part._parameters, part._buffers, part._modules = {}, {}, dict(experts._modules)
            for leaf, tensor in tensors.items():
                shape = (len(ids), *tensor.shape[1:])
                part._parameters[leaf] = nn.Parameter(torch.empty(shape, dtype=tensor.dtype, device="meta"), name.startswith("trained"))
            part.num_experts = len(ids)
            setattr(self, name, part)
        self._tables: tuple[Tensor, Tensor] | None = None

    def parts(self) -> Iterator[tuple[nn.Module, tuple[int, ...]]]:
        return ((getattr(self, name), ids) for name, ids in self.ids.items())

    def rows(self, part: str) -> tuple[tuple[int, ...], int]:
        """(ids of all experts that are trained, or frozen, like this part's; position of this part's first expert among them).

        The weights of these experts one below the other are the tensor that a checkpoint holds, however it is cut into units."""
        kind = part.rstrip("0123456789")
        alike = tuple(expert for name, ids in self.ids.items() if name.startswith(kind) for expert in ids)
        return alike, alike.index(self.ids[part][0])

    def _lookup(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """[E] each: the part that an expert is in, and its number there."""
        if self._tables is None or self._tables[0].device != device:
            part_of, place = torch.empty(2, self.num_experts, dtype=torch.long)
            for number, ids in enumerate(self.ids.values()):
                part_of[list(ids)], place[list(ids)] = number, torch.arange(len(ids))
            self._tables = part_of.to(device), place.to(device)
        return self._tables

    @torch.compiler.disable  # how many pairs each part gets differs in every row: a compiler would start anew again and again
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H]."""
        num_tokens, top_k = top_k_index.shape
        part_of, place = self._lookup(hidden_states.device)
        experts = top_k_index.reshape(-1)
        pairs_part = part_of[experts]
        order = torch.argsort(pairs_part, stable=True)  # pairs, part by part
        counts = torch.bincount(pairs_part, minlength=len(self.ids)).tolist()
        outputs = []
        for name, pairs in zip(self.ids, order.split(counts), strict=True):
            rows, index = hidden_states[pairs // top_k], place[experts[pairs]]
            if not len(pairs):  # a part without a token takes part in backward too: its gradient is reduced over all ranks
                rows, index = hidden_states[:1], place[:1] * 0
            weights = torch.ones(len(rows), 1, dtype=top_k_weights.dtype, device=rows.device)
            outputs.append(getattr(self, name)(rows, index[:, None], weights)[: len(pairs)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        by_token = torch.cat(outputs)[back].view(num_tokens, top_k, -1)
        return (by_token * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def split_experts(model: nn.Module, paths: dict[str, tuple[int, ...]], num_units: int = 1) -> None:
    """Replaces the experts at each path of a model on meta by SplitExperts; `paths`: path -> experts that train (may be none or all)."""
    for path, trained in paths.items():
        owner, _, leaf = path.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, leaf, SplitExperts(getattr(parent, leaf), trained, num_units))


def destinations(model: nn.Module, name: str) -> list[tuple[nn.Module, str, tuple[int, ...] | None]]:
    """Where a model tensor lives: (module, parameter or buffer there, the experts it holds or None for the whole tensor)."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, SplitExperts):
        return [(part, leaf, ids) for part, ids in module.parts()]
    return [(module, leaf, None)]


# ----------------------------------------------------------------------------------------------------------------------------------
# Which experts to train


class RoutingCounts:
    """Forward hooks that add up, for each MoE layer of a sharded model, tokens and routing weight that each expert receives.

    Counts what `RouterStats.recording` marks as real tokens; make it after the model is sharded."""

    def __init__(self, sharded):
        from common.fsdp import model_name

        layers = {unit.name: number for number, unit in enumerate(sharded.units) if unit.name}
        self.tables: dict[int, Tensor] = {}  # layer -> [2, E] float64: tokens, weight
        for name, module in sharded.root.named_modules():
            if hasattr(module, "num_counted_experts") and hasattr(module, "observer"):
                layer = next(number for path, number in layers.items() if model_name(name).startswith(path + "."))
                if layer not in self.tables:  # a wrapper forwards attributes, so that a router is met twice
                    device = next(module.parameters()).device
                    self.tables[layer] = torch.zeros(2, module.num_counted_experts, dtype=torch.float64, device=device)
                    self._inner(module).register_forward_hook(self._hook(self.tables[layer]))

    def _inner(self, module: nn.Module) -> nn.Module:
        return getattr(module, "_fsdp_wrapped_module", module)

    def _hook(self, table: Tensor):
        def count(router, _inputs, output):
            _, weights, indices = output
            if len(indices) != len(router.valid):
                return
            valid = router.valid.double()[:, None].expand_as(indices).flatten()
            table[0].scatter_add_(0, indices.flatten(), valid)
            table[1].scatter_add_(0, indices.flatten(), valid * weights.double().flatten())

        return count


def count(arguments: list[str]) -> int:
    """`count`: the base model's routing of the config's training data, as JSON."""
    from common import config, data, dist, run
    from common.config import DataArguments, ModelArguments, TrainArguments, option

    @dataclass
    class CountArguments(TrainArguments):
        """Where the counts go; the options of a training config are accepted and have no effect."""

        output_dir: str = option("", "Not used, but for the cache of tokenised data.")
        output: str = option("", "JSON file to write.")
        max_bins: int = option(0, "Only the first N bins of data (in the training order of epoch 0); 0: all.")

        def __post_init__(self):
            super().__post_init__()
            if not self.output:
                raise ValueError("output is missing: the file that the counts go to.")

    model_args, data_args, args = config.parse(ModelArguments, DataArguments, CountArguments, argv=arguments)
    dist.init(args.setup_timeout_minutes)
    dist.setup_logging()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    cache = Path(args.output_dir or Path(args.output).resolve().parent)
    dataset, bins = run.load_data(data_args.train_files, tokenizer, data_args, cache)
    # A config for training may name the mask that is to be made from these counts.
    plain = {"trainable": "all", "trainable_layers": "all", "expert_mask": None, "detach_moe_output": False, "load_balancing_coef": 0.0}
    model = run.build_model(replace(model_args, **plain), trainable="none")
    if not model.num_experts_layers:
        raise ValueError(f"{model_args.model_name_or_path} is a dense model: it has no experts to count.")
    counts = RoutingCounts(model.sharded)
    model.sharded.train(False)
    total = min(args.max_bins or len(bins), len(bins))
    chosen, _, _ = data.Order(len(bins), args.seed).next(0, 0, total)
    tokens = 0
    pad_to = data_args.max_length if model_args.compile else None
    bar = dist.progress(-(-total // dist.world_size()), "counting", "batch")
    for first in range(0, total, dist.world_size()):
        mine = first + dist.rank()
        batch = data.collate(dataset, bins, [chosen[min(mine, total - 1)]], pad_to=pad_to).to(dist.device())
        real = batch.num_tokens if mine < total else 0  # a rank without a bin left runs one that does not count
        with torch.no_grad():
            model.sharded(batch.model_inputs(), batch.targets, num_tokens=real)
        tokens += real
        bar.update()
    bar.close()
    tables = {layer: dist.all_sum(table) for layer, table in sorted(counts.tables.items())}
    (tokens,) = run.agree(tokens)
    with dist.main_rank_first() as mine:
        if mine:
            content = {
                "model": str(model_args.model_name_or_path),
                "data": list(data_args.train_files),
                "tokens": int(tokens),
                "layers": {
                    str(layer): {"count": [int(value) for value in table[0].tolist()], "weight": table[1].tolist()}
                    for layer, table in tables.items()
                },
            }
            Path(args.output).parent.mkdir(parents=True, exist_ok=True)
            Path(args.output).write_text(json.dumps(content) + "\n", encoding="utf-8")
            print(f"{args.output}: {int(tokens)} tokens, {len(tables)} layers")
    dist.shutdown()
    return 0


@dataclass
class Proposal:
    """Experts of each layer that were chosen, and the share of the layer's routing that they cover."""

    experts: dict[int, list[int]] = field(default_factory=dict)
    shares: dict[int, list[float]] = field(default_factory=dict)  # of every expert of the layer, chosen or not

    def covered(self, layer: int) -> float:
        return sum(self.shares[layer][expert] for expert in self.experts.get(layer, []))


def propose(counts: dict, top_k: int, scope: str, by: str) -> Proposal:
    """The `top_k` experts of each layer (scope `layer`), or of all layers together (`all`), that receive most tokens or weight.

    counts: content of a file of `count`. Among equals the lower number wins. ValueError where there are not so many experts.
    """
    proposal = Proposal()
    for layer, table in counts["layers"].items():
        total = sum(table[by])
        proposal.shares[int(layer)] = [value / total if total else 0.0 for value in table[by]]
    ranking = [(-share, layer, expert) for layer, shares in proposal.shares.items() for expert, share in enumerate(shares)]
    groups = [ranking] if scope == "all" else [[entry for entry in ranking if entry[1] == layer] for layer in proposal.shares]
    for group in groups:
        if not 1 <= top_k <= len(group):
            raise ValueError(
                f"top_k is {top_k}; it must lie between 1 and the {len(group)} experts {'in all' if scope == 'all' else 'of a layer'}"
            )
        for _, layer, expert in sorted(group)[:top_k]:
            proposal.experts.setdefault(layer, []).append(expert)
    proposal.experts = {layer: sorted(experts) for layer, experts in sorted(proposal.experts.items())}
    return proposal


def heat_map(proposal: Proposal, title: str, output: Path, matplotlib) -> None:
    """Share of each layer's routing by expert; chosen ones are marked."""
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    layers = list(proposal.shares)
    width = max(len(shares) for shares in proposal.shares.values())
    figure, axes = pyplot.subplots(figsize=(max(6.0, width / 12), max(3.0, len(layers) / 8)), layout="constrained")
    rows = [shares + [float("nan")] * (width - len(shares)) for shares in proposal.shares.values()]
    image = axes.imshow(rows, aspect="auto", cmap="viridis", interpolation="nearest")
    marks = [(expert, layers.index(layer)) for layer, experts in proposal.experts.items() for expert in experts]
    axes.scatter([x for x, _ in marks], [y for _, y in marks], s=6, c="red", marker="s", label="chosen")
    axes.set_yticks(range(len(layers)), layers, fontsize=6)
    axes.set(xlabel="expert", ylabel="layer", title=title)
    axes.legend(loc="upper right", fontsize=6)
    figure.colorbar(image, label="share of the layer's routing")
    figure.savefig(output, dpi=150)
    pyplot.close(figure)


def select(arguments: list[str]) -> int:
    """`select`: a mask from counts, with its statistics and a heat map."""
    parser = argparse.ArgumentParser(prog="python -m common.experts select", allow_abbrev=False)
    parser.add_argument("--counts", required=True, help="file written by `count`")
    parser.add_argument("--top_k", type=int, required=True, help="experts to choose")
    parser.add_argument("--scope", choices=["layer", "all"], default="layer", help="top_k of each layer, or of all layers together")
    parser.add_argument("--by", choices=["count", "weight"], default="count", help="tokens, or routing weight, that an expert receives")
    parser.add_argument("--output", required=True, help="mask.json; mask.stats.json and mask.png are written beside it")
    args = parser.parse_args(arguments)
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError("the heat map needs matplotlib. Install it: bash env/setup.sh train --with matplotlib") from error
    try:
        counts = json.loads(Path(args.counts).read_text(encoding="utf-8"))
        proposal = propose(counts, args.top_k, args.scope, args.by)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{args.counts} is not a file of `count`: {error!r}") from error
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({str(layer): ids for layer, ids in proposal.experts.items()}) + "\n", encoding="utf-8")
    covered = sum(proposal.covered(layer) for layer in proposal.shares) / len(proposal.shares)
    statistics = {
        "model": counts["model"],
        "data": counts["data"],
        "tokens": counts["tokens"],
        "top_k": args.top_k,
        "scope": args.scope,
        "by": args.by,
        "covered": covered,
        "layers": {
            str(layer): {"experts": proposal.experts.get(layer, []), "covered": proposal.covered(layer), "shares": shares}
            for layer, shares in proposal.shares.items()
        },
    }
    output.with_suffix(".stats.json").write_text(json.dumps(statistics, indent=1) + "\n", encoding="utf-8")
    heat_map(
        proposal, f"top {args.top_k} by {args.by}, scope {args.scope}: {covered:.1%} of routing", output.with_suffix(".png"), matplotlib
    )
    chosen = sum(map(len, proposal.experts.values()))
    print(f"{output}: {chosen} experts in {len(proposal.experts)} layers, which receive {covered:.1%} of the routing")
    return 0


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m common.experts", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("command", choices=["count", "select"])
    command = parser.parse_args(arguments[:1]).command
    try:
        return {"count": count, "select": select}[command](arguments[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
