"""How hard each prompt is for a model, measured before training: which prompts to keep, and how many groups will carry no signal.

    python -m grpo.difficulty measure --model BASE --data prompts.jsonl --samples 8 --output d.jsonl      # or --server http://node7:8000
    python -m grpo.difficulty filter --difficulty d.jsonl --data prompts.jsonl --keep 2-5 --output kept.jsonl
    python -m grpo.difficulty report --difficulty d.jsonl --num_generations 8

`measure` samples n answers to each prompt and counts the k right ones: those to which the reward function gives at least --right. A line of
d.jsonl: id, k, n, model_fingerprint, row_hash. The answers lie beside it (d.answers.jsonl), so a killed measurement goes on where it was;
d.jsonl.meta.json says what measured. `filter` and `report` warn where the measurement is of other rows, of another model (--model), or drawn
in another way than a run (--config) will draw.

Levels (arXiv 2505.17952, which has n = 5): L1 all n right, L6 none right, between them 1 + round(5 (n - k) / n), halves to even, at least 2
and at most 5. Exit codes: 0 good, 1 servers that do not answer any more, 2 wrong use.
"""

import argparse
import hashlib
import importlib
import json
import logging
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from tqdm import tqdm

from common import checkpoint, generate, rows
from common.chat import BadRow, template_options
from common.jsonl import read_json_object, refuse_overwriting, write_json, write_lines
from grpo.endpoint import read_mapping
from grpo.rollout import NOT_COLUMNS
from grpo.sampling import PASS, expected_collapse, fill_probability, fit_prior, read_pass_rates
from grpo.scoring import RewardArguments, RewardPool

log = logging.getLogger(__name__)

LEVELS = range(1, 7)


def level(k: int, n: int) -> int:
    """1 (all of n right) to 6 (none). The rounded formula alone would call 15 of 16 "all right"."""
    if k in (0, n):
        return 1 if k else 6
    return min(5, max(2, 1 + round(Fraction(5 * (n - k), n))))


def parse_levels(text: str) -> set[int]:
    """{2, 3, 4, 5} of "2-5", {1, 6} of "1,6"."""
    wanted = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"keep is {text!r}; it must be levels like 2-5 or 1,3-4")
        wanted |= set(range(int(first), int(last or first) + 1))
    if not wanted or not wanted <= set(LEVELS):
        raise ValueError(f"keep is {text!r}; levels go from 1 (all answers right) to 6 (none right)")
    return wanted


# ---- rows ----------------------------------------------------------------------------------------------------------------------------


def read_data(files: list[str]) -> dict[str, dict]:
    """Rows by id, in order. ValueError names file and line of one that is bad, has no prompt or has an id that was there before."""
    found: dict[str, dict] = {}
    for file in files:
        for line, row in rows.read_rows(file):
            if isinstance(row, BadRow):
                raise ValueError(f"{file}:{line}: {row}")
            if not isinstance(row.get("prompt"), (str, list)) or not row["prompt"]:
                raise ValueError(
                    f"{file}:{line}: a row needs `prompt`: messages or text; columns found: {', '.join(map(str, row)) or 'none'}"
                )
            name = rows.row_id(row, file, line)
            if name in found:
                raise ValueError(f"{file}:{line}: the id {name!r} is there twice")
            try:
                template_options(row)
            except BadRow as error:
                raise ValueError(f"{file}:{line}: {error}") from error
            found[name] = row
    if not found:
        raise ValueError(f"{', '.join(files)}: no prompt")
    return found


def row_hash(row: dict) -> str:
    """Of all that decides whether an answer is right: the whole row but its id."""
    content = {name: value for name, value in row.items() if name != "id"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass
class Measurement:
    """A file of `measure` with what is known about it."""

    path: str
    lines: dict[str, dict]
    meta: dict  # empty where the file came without

    @property
    def rates(self) -> dict[str, tuple[int, int]]:
        return {name: (line["k"], line["n"]) for name, line in self.lines.items()}


def read_measurement(path: str) -> Measurement:
    """ValueError names the line without id, k and n, and a meta file that is not whole."""
    rates = read_pass_rates(path)
    with open(path, encoding="utf-8") as file:
        lines = {str(line["id"]): line for line in map(json.loads, file)}
    if not rates:
        raise ValueError(f"{path} holds no measured prompt")
    meta = generate.meta_path(path)
    content = read_json_object(meta) if meta.is_file() else {}
    if not isinstance(content.get("sampling", {}), dict):
        raise ValueError(f"{meta}: `sampling` must be a JSON object, not {content['sampling']!r}")
    return Measurement(path, lines, content)


def stale_warnings(
    measured: Measurement, *, data: dict[str, dict] | None = None, fingerprint: str | None = None, run: dict | None = None
) -> list[str]:
    """What makes a measurement say little about the `data` (rows by id), the model with `fingerprint`, or a `run` with these options."""
    texts = []
    fingerprints = {line.get("model_fingerprint") for line in measured.lines.values()}
    if len(fingerprints) > 1:
        texts.append(f"{measured.path} was measured with {len(fingerprints)} different models: levels do not compare")
    if fingerprint is not None and fingerprints != {fingerprint}:
        texts.append(
            f"{measured.path} was measured with another model ({measured.meta.get('model', 'unknown')}): measure again with this one"
        )
    if data is not None:
        unknown = [name for name in data if name not in measured.lines]
        hashes = {name: line.get("row_hash") for name, line in measured.lines.items()}
        changed = [name for name in data if hashes.get(name) is not None and hashes[name] != row_hash(data[name])]
        if unknown:
            texts.append(f"{len(unknown)} of {len(data)} prompts were not measured, for instance {unknown[0]}: `measure` again adds them")
        if changed:
            texts.append(
                f"{len(changed)} of {len(data)} rows have changed since they were measured, for instance {changed[0]}: `measure` again"
            )
    if run:
        sampled = measured.meta.get("sampling", {}) | {"reward_func": measured.meta.get("reward_func")}
        names = {"temperature": "temperature", "top_p": "top_p", "max_completion_length": "max_new_tokens"}
        texts += [
            f"{measured.path} was measured with {theirs} {sampled[theirs]}, the run has {ours} {run[ours]}"
            for ours, theirs in names.items()
            if ours in run and theirs in sampled and float(run[ours]) != float(sampled[theirs])
        ]
        if run.get("reward_funcs") and sampled["reward_func"] and sampled["reward_func"] not in run["reward_funcs"]:
            texts.append(f"{measured.path} was measured with {sampled['reward_func']}, which is none of the run's reward_funcs")
    return texts


def _warn(measured: Measurement, args: argparse.Namespace, data: dict[str, dict] | None = None) -> None:
    run = read_mapping(args.config) if args.config else {}
    model = args.model or run.get("model_name_or_path")
    fingerprint = checkpoint.fingerprint(model) if model and Path(model).is_dir() else None
    if args.model and fingerprint is None:
        raise ValueError(f"model {args.model} is not a folder")
    for text in stale_warnings(measured, data=data, fingerprint=fingerprint, run=run):
        print(f"warning: {text}", file=sys.stderr)


# ---- measure -------------------------------------------------------------------------------------------------------------------------


def measure(arguments: list[str]) -> int:
    """`measure`: samples answers and counts the right ones."""
    parser = argparse.ArgumentParser(prog="python -m grpo.difficulty measure", allow_abbrev=False)
    generate.add_arguments(parser, samples=8, temperature=1.0)
    parser.add_argument("--data", nargs="+", required=True, help="prompts as for training")
    parser.add_argument("--output", required=True, help="d.jsonl")
    parser.add_argument("--reward_func", default="grpo.rewards:choice_exact", help="says what is right (default grpo.rewards:choice_exact)")
    parser.add_argument("--right", type=float, default=PASS, help=f"least reward of a right answer (default {PASS})")
    parser.add_argument("--reward_timeout", type=float, default=60.0, help="seconds for the answers to one prompt (default 60)")
    parser.add_argument("--reward_workers", type=int, default=4, help="processes that score (default 4)")
    parser.add_argument("--chat_template_kwargs", default="{}", help="arguments of the chat template as JSON; a row's own win")
    args = parser.parse_args(arguments)
    output = Path(args.output)
    if output.suffix != ".jsonl":
        raise ValueError(f"output must be named *.jsonl, not {output}")
    if not math.isfinite(args.right):
        raise ValueError(f"right is {args.right}; it must be a number")
    refuse_overwriting(generate.outputs(output), args.data)
    kwargs = generate.template_kwargs(args.chat_template_kwargs)
    source, sampling = generate.source_of(args), generate.sampling_of(args)
    data = read_data(args.data)
    asks = []
    for name, row in data.items():
        tools, own = template_options(row)
        asks.append(generate.Ask(name, row["prompt"], tools, kwargs | own))
    rewards = RewardArguments([args.reward_func], reward_timeout=args.reward_timeout, reward_workers=args.reward_workers)
    # Before hours of sampling: a reward function that cannot be loaded, or a row that it cannot use, is an error now.
    with RewardPool(rewards, hint="The same command goes on when the function or the row is mended") as pool:
        check_rows(pool, data)
        made = output.with_suffix(".answers.jsonl")
        answers = generate.generate(source, asks, sampling, made)
        identity = generate.read_meta(made)
        counted = count_right(pool, data, answers, args.right)
    unscored = [name for name, (_, n) in counted.items() if n == 0]
    if unscored:
        log.warning("%d prompts have no scored answer and are left out, for instance %s", len(unscored), unscored[0])
    meta = {"model": identity["model"], "fingerprint": identity["fingerprint"], "sampling": asdict(sampling)}
    write_json(generate.meta_path(output), meta | {"reward_func": args.reward_func, "right": args.right, "data": args.data})
    write_lines(
        output,
        (
            {"id": name, "k": k, "n": n, "model_fingerprint": identity["fingerprint"], "row_hash": row_hash(data[name])}
            for name, (k, n) in counted.items()
            if n
        ),
    )
    right, total = (sum(values) for values in zip(*counted.values(), strict=True))
    if not total:
        raise ValueError(f"{args.reward_func} scored none of the answers")
    print(f"{output}: {len(counted) - len(unscored)} prompts, {right} of {total} answers are right ({right / total:.1%})")
    return 0


def check_rows(pool: RewardPool, data: dict[str, dict]) -> None:
    """ValueError names a row that the reward function cannot use (no right answer): its own `check` says so, or it fails on an empty answer,
    of which models give some."""
    if wrong := pool.check([(name, reward_columns(row)) for name, row in data.items()]):
        name, text = next(iter(wrong.items()))
        raise ValueError(f"prompt {name} cannot be scored: {text}. {len(wrong)} of {len(data)} rows are like that")
    names = list(data)
    for first in range(0, len(names), 1024):
        try:
            pool.score([(name, data[name]["prompt"], [""], reward_columns(data[name])) for name in names[first : first + 1024]])
        except RuntimeError as error:
            raise ValueError(f"before anything was sampled, an empty answer was scored: {error}") from error


def reward_columns(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in NOT_COLUMNS}


def count_right(pool: RewardPool, data: dict[str, dict], answers: dict[str, list[dict]], right: float) -> dict[str, tuple[int, int]]:
    """{id: (right answers, scored answers)}"""
    counted, names = {}, list(data)
    step = 8 * pool.args.reward_workers
    for first in tqdm(range(0, len(names), step), desc="scoring", unit="batch"):
        part = names[first : first + step]
        groups = [
            (
                name,
                data[name]["prompt"],
                [line["completion"] for line in answers[name]],
                reward_columns(data[name]),
            )
            for name in part
        ]
        for name, scores in zip(part, pool.score(groups), strict=True):
            values = [score.reward for score in scores if score.reward is not None]
            counted[name] = (sum(value >= right for value in values), len(values))
    return counted


# ---- filter --------------------------------------------------------------------------------------------------------------------------


def filter_rows(arguments: list[str]) -> int:
    """`filter`: the rows whose level is kept, as they are; a row without id gets the one that it was measured under."""
    parser = argparse.ArgumentParser(prog="python -m grpo.difficulty filter", allow_abbrev=False)
    add_measurement_arguments(parser)
    parser.add_argument("--data", nargs="+", required=True, help="the prompts that were measured")
    parser.add_argument("--keep", default="2-5", help="levels, 1 (all right) to 6 (none right): 2-5 (default), 1,3-4")
    parser.add_argument("--output", required=True, help="JSON Lines")
    args = parser.parse_args(arguments)
    wanted = parse_levels(args.keep)
    if not args.output.endswith(".jsonl"):
        raise ValueError(f"output must be named *.jsonl, not {args.output}")
    refuse_overwriting([args.output], [*args.data, args.difficulty, generate.meta_path(args.difficulty)])
    data, measured = read_data(args.data), read_measurement(args.difficulty)
    if not any(name in measured.lines for name in data):
        raise ValueError(f"{args.difficulty} has none of the ids of {', '.join(args.data)}: measure these prompts")
    _warn(measured, args, data)
    levels = {name: level(*rate) for name, rate in measured.rates.items() if name in data}
    kept = [row if row.get("id") is not None else row | {"id": name} for name, row in data.items() if levels.get(name) in wanted]
    counts = Counter(levels.values())
    print(", ".join(f"L{number} {counts[number]}{'' if number in wanted else ' dropped'}" for number in LEVELS))
    if not kept:
        raise ValueError(f"no row has a level in {args.keep}: nothing is written")
    write_lines(args.output, kept)
    print(f"{args.output}: {len(kept)} of {len(data)} rows")
    return 0


# ---- report --------------------------------------------------------------------------------------------------------------------------


def observed_collapse(k: int, n: int, num_generations: int) -> float:
    """Chance that `num_generations` of the n measured answers, drawn without replacement, are all right or all wrong: unbiased for a group."""
    return (math.comb(k, num_generations) + math.comb(n - k, num_generations)) / math.comb(n, num_generations)


def predict(rates: list[tuple[int, int]], num_generations: int, prior: tuple[float, float]) -> dict[str, float | None]:
    """Expected share of groups without signal: by the fitted prior, a uniform one, and (groups of at most n answers) without any."""
    G, size = num_generations, len(rates)
    observed = None if any(n < G for _, n in rates) else math.fsum(observed_collapse(k, n, G) for k, n in rates) / size
    return {
        "fitted": math.fsum(expected_collapse(k, n, G, prior) for k, n in rates) / size,
        "uniform": math.fsum(expected_collapse(k, n, G) for k, n in rates) / size,
        "observed": observed,
    }


def summarise(measured: Measurement, num_generations: int, max_resample_times: int, num_prompts_per_step: int) -> dict:
    rates = list(measured.rates.values())
    prior = fit_prior(rates)
    levels = []
    for number in LEVELS:
        mine = [rate for rate in rates if level(*rate) == number]
        levels.append(
            {
                "level": number,
                "prompts": len(mine),
                "share": len(mine) / len(rates),
                "collapse": predict(mine, num_generations, prior)["fitted"] if mine else None,
            }
        )
    middle = [rate for rate in rates if level(*rate) in range(2, 6)]
    collapse = predict(rates, num_generations, prior)
    return {
        "prompts": len(rates), "model": measured.meta.get("model"), "pass_rate": math.fsum(k / n for k, n in rates) / len(rates), "prior": prior,
        "num_generations": num_generations, "levels": levels, "collapse": collapse,
        "collapse_kept_2_5": predict(middle, num_generations, prior)["fitted"] if middle else None,
        "max_resample_times": max_resample_times, "bound": 1 - 1 / max_resample_times,
        "batches_needed": 1 / max(1 - collapse["fitted"], 1e-9), "fills": collapse["fitted"] <= 1 - 1 / max_resample_times,
        "num_prompts_per_step": num_prompts_per_step, "fill_probability": fill_probability(num_prompts_per_step, max_resample_times, collapse["fitted"]),
    }  # fmt: skip


def print_summary(found: dict) -> None:
    print(f"{found['prompts']} prompts, model {found['model']}, mean pass rate {found['pass_rate']:.3f}")
    print("level  prompts   share  collapse")
    for row in found["levels"]:
        bar = "#" * round(40 * row["share"])
        collapse = "     -" if row["collapse"] is None else f"{row['collapse']:6.3f}"
        print(f"L{row['level']}  {row['prompts']:10d}  {row['share']:6.1%}    {collapse}  {bar}".rstrip())
    by = found["collapse"]
    observed = "needs at least as many samples as the group has" if by["observed"] is None else f"{by['observed']:.4f}"
    print(
        f"groups of {found['num_generations']} without signal: {by['fitted']:.4f} (Beta({found['prior'][0]:.2f}, {found['prior'][1]:.2f}) fitted to the pass rates)"
    )
    print(f"  uniform prior: {by['uniform']:.4f}; from the measured answers alone: {observed}")
    if found["collapse_kept_2_5"] is not None:
        print(f"  with --keep 2-5: {found['collapse_kept_2_5']:.4f}")
    R, N = found["max_resample_times"], found["num_prompts_per_step"]
    print(
        f"dynamic sampling with {R} batches bears {found['bound']:.4f}; {found['batches_needed']:.2f} are needed on average: {'enough' if found['fills'] else 'NOT enough'}"
    )
    print(f"  {N} prompts a step are filled with probability {found['fill_probability']:.4f}")


def draw(measured: Measurement, found: dict, path: Path, matplotlib) -> None:
    """Prompts by share of right answers, coloured by level; the predicted collapse over the group size."""
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    rates = list(measured.rates.values())
    for number in LEVELS:
        counts = Counter(k / n for k, n in rates if level(k, n) == number)
        if not counts:
            continue
        left.bar(counts.keys(), counts.values(), width=0.8 / max(n for _, n in rates), label=f"L{number}: {sum(counts.values())}")
    left.set(xlim=(-0.1, 1.1), xlabel="share of right answers", ylabel="prompts", title=f"{found['prompts']} prompts")
    left.legend(fontsize=7)
    sizes = [2, 4, 6, 8, 12, 16, 24, 32]
    kept = [rate for rate in rates if level(*rate) in range(2, 6)]
    right.plot(sizes, [predict(rates, size, found["prior"])["fitted"] for size in sizes], "o-", label="all prompts")
    if kept:
        right.plot(sizes, [predict(kept, size, found["prior"])["fitted"] for size in sizes], "o-", label="levels 2-5")
    right.axhline(found["bound"], color="grey", linestyle="--", label=f"bound of {found['max_resample_times']} batches")
    right.set(xlabel="answers in a group", ylabel="groups without signal", ylim=(0, 1), title="predicted collapse")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(arguments: list[str]) -> int:
    """`report`: histogram, predicted collapse, whether dynamic sampling can work, plot."""
    parser = argparse.ArgumentParser(prog="python -m grpo.difficulty report", allow_abbrev=False)
    add_measurement_arguments(parser)
    parser.add_argument("--num_generations", type=int, default=8, help="answers in a group (default 8)")
    parser.add_argument("--max_resample_times", type=int, default=3, help="batches that dynamic sampling may draw (default 3)")
    parser.add_argument("--num_prompts_per_step", type=int, default=32, help="groups that a rollout needs (default 32)")
    parser.add_argument("--plot", default=None, help="PNG file, default beside the measurement (d.png); none: no plot")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(arguments)
    if args.num_generations < 2 or args.max_resample_times < 1 or args.num_prompts_per_step < 1:
        raise ValueError("num_generations must be at least 2, max_resample_times and num_prompts_per_step at least 1")
    path = Path(args.plot or Path(args.difficulty).with_suffix(".png"))
    refuse_overwriting([] if args.plot == "none" else [path], [args.difficulty, generate.meta_path(args.difficulty)])
    measured = read_measurement(args.difficulty)
    _warn(measured, args)
    found = summarise(measured, args.num_generations, args.max_resample_times, args.num_prompts_per_step)
    print(json.dumps(found)) if args.json else print_summary(found)
    if args.plot != "none":
        try:
            matplotlib = importlib.import_module("matplotlib")
        except ImportError as error:
            raise ValueError(
                "the plot needs matplotlib (--plot none goes without). Install it: bash env/setup.sh train --with matplotlib"
            ) from error
        draw(measured, found, path, matplotlib)
        print(f"plot: {path}", file=sys.stderr)
    return 0


# ---- command line --------------------------------------------------------------------------------------------------------------------


def add_measurement_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--difficulty", required=True, help="a file of `measure`")
    parser.add_argument("--model", help="warn where another checkpoint was measured than this folder")
    parser.add_argument("--config", help="a run's YAML: warn where its model, sampling or reward function is another")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m grpo.difficulty", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("command", choices=["measure", "filter", "report"])
    command = parser.parse_args(arguments[:1]).command
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        return {"measure": measure, "filter": filter_rows, "report": report}[command](arguments[1:])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
