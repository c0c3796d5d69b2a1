"""Do the rewards of a run belong to its answers? And what did it learn, beside the untrained model?

    python -m grpo.audit runs/a                          # data files as in runs/a/config.yaml; --data F where they have moved
    python -m grpo.audit runs/a --baseline               # also asks the untrained model (in this process, or --server URL)

1. Every saved answer (rollouts/step-*, filtered-*, eval-*, baseline-*) is scored again by the run's reward functions with the row that the
   data file holds under its id. What the run saved of the row is only compared with it. Each disagreement with a stored reward is shown.
2. Exact match and F1 on the same answers, where `answer` holds letters: groups without signal, ranks that change.
3. The reward of each rollout, and of each evaluation beside the one before the first step. With a baseline: the difference from the
   untrained model on the same prompts, sampled in the same way; the interval takes prompts as the unit.

The baseline is in the run itself where it was trained with `baseline_prompts` (measured before the first step). `--baseline` measures one
afterwards; its answers are in RUN/baseline/. Exit code 1: rewards do not match the answers; 2: wrong use. Everything is in RUN/audit.json.
The same check is made on the first rollout of every run.
"""

import argparse
import contextlib
import json
import logging
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import yaml
from tqdm import tqdm
from transformers import AutoTokenizer

from common import checkpoint, dist, generate, rows
from common.chat import BadRow
from common.jsonl import refuse_overwriting, write_json, write_lines
from common.questions import difference
from grpo import experience
from grpo.audit_figures import by_prompt, compare_marks, curve, mean
from grpo.experience import Setup
from grpo.rollout import NOT_COLUMNS, Answer, read_lines, rollout_path
from grpo.sampling import Prompts
from grpo.scoring import RewardArguments, RewardPool, combine

log = logging.getLogger(__name__)

TOLERANCE = 1e-6
KINDS = ("step", "filtered", "eval", "baseline")


# ---- scoring again -------------------------------------------------------------------------------------------------------------------


def rows_by_id(files: list[str], wanted: set[str] | None = None) -> dict[str, dict]:
    """Rows of the data files by id, as the run read them: the first of two with one id, without those that cannot be read."""
    found: dict[str, dict] = {}
    for file in files:
        if not Path(file).is_file():
            raise ValueError(f"{file} does not exist: give the run's data with --data")
        for line, row in rows.read_rows(file):
            if isinstance(row, BadRow) or not row.get("prompt"):
                continue
            name = rows.row_id(row, file, line)
            if wanted is None or name in wanted:
                found.setdefault(name, row)
        if wanted is not None and len(found) == len(wanted):
            break
    return found


def plain(value):
    """As it comes back from a rollout file."""
    return json.loads(json.dumps(value, ensure_ascii=False, default=str))


def columns_of(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in NOT_COLUMNS}


Rewards = dict[str, float | None]  # of one answer, by component


def score_again(pool: RewardPool | None, names: list[str], lines: list[dict], data: dict[str, dict]) -> list[Rewards]:
    """What the pool's reward functions, whose components are `names`, say about each saved answer with the data's own row."""
    if pool is None:
        return [{} for _ in lines]
    groups: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        groups.setdefault(line["id"], []).append(index)
    asked = [(name, data[name]["prompt"], [lines[i]["completion"] for i in g], columns_of(data[name])) for name, g in groups.items()]
    found: list[Rewards] = [{} for _ in lines]
    for indices, results in zip(groups.values(), pool.score(asked), strict=True):
        for index, result in zip(indices, results, strict=True):
            found[index] = dict(zip(names, result.rewards.values(), strict=True))
    return found


def same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def disagreements(lines: list[dict], again: list[Rewards], weights: list[float], skip: Iterable[str] = ()) -> tuple[list[dict], int]:
    """(each stored number that is not what it should be: {id, sample, what, stored, found}, how many could not be compared).

    A None on one side only cannot be compared: a judge that did not answer, a call that failed (its answer was not trained on). `skip`:
    components not to compare.
    """
    found, silent = [], 0
    for line, rewards in zip(lines, again, strict=True):
        pairs = {name: (line["rewards"].get(name), value) for name, value in rewards.items() if name not in skip}
        one_sided = {name for name, (stored, value) in pairs.items() if (stored is None) != (value is None)}
        silent += len(one_sided)
        pairs = {name: pair for name, pair in pairs.items() if name not in one_sided}
        total = combine(line["rewards"] | {name: value for name, (_, value) in pairs.items()}, weights).reward
        pairs["reward"] = (line["reward"], total)
        found += [problem(line, name, stored, value) for name, (stored, value) in pairs.items() if not same(stored, value)]
    return found, silent


def wrong_order(lines: list[dict]) -> list[dict]:
    """Advantages that do not rise with the reward inside a group, so they belong to other answers. (Not so with gdpo, by design.)"""
    found = []
    groups: dict[str, list[dict]] = {}
    for line in lines:
        if line["reward"] is not None:
            groups.setdefault(line["id"], []).append(line)
    for group in groups.values():
        group = sorted(group, key=lambda line: line["reward"])
        for lower, higher in zip(group, group[1:], strict=False):
            step = higher["advantage"] - lower["advantage"]
            if step < -TOLERANCE or (same(lower["reward"], higher["reward"]) and step > TOLERANCE):
                what = f"advantage, beside sample {lower['sample']} with reward {lower['reward']:g} and {lower['advantage']:.4f}"
                found.append(problem(higher, what, higher["advantage"], None))
    return found


def problem(line: dict, what: str, stored, found) -> dict:
    return {"id": line["id"], "sample": line["sample"], "what": what, "stored": stored, "found": found}


def check_texts(lines: list[dict], tokenizer) -> list[dict]:
    """Answers whose text, which is what was scored, is not that of their ids, which are what was trained on."""
    lines = [line for line in lines if line.get("completion_ids") is not None]
    texts = tokenizer.batch_decode([line["completion_ids"] for line in lines], skip_special_tokens=True)
    return [problem(line, "text", line["completion"], text) for line, text in zip(lines, texts, strict=True) if line["completion"] != text]


def shifted(lines: list[dict], again: list[Rewards]) -> str | None:
    """Where the stored rewards are those of other prompts of the same file, always so many places away: says so."""
    stored, found = {}, {}
    for line, rewards in zip(lines, again, strict=True):
        stored.setdefault(line["id"], {})[line["sample"]] = {name: line["rewards"].get(name) for name in rewards}
        found.setdefault(line["id"], {})[line["sample"]] = rewards
    names = [*stored]
    for places in (1, -1, 2, -2):
        other = names[-places:] + names[:-places]
        hits = [name for name, o in zip(names, other, strict=True) if stored[name] == found[o] and stored[name] != found[name]]
        if len(hits) > len(names) / 3:
            where = f"{abs(places)} {'before' if places > 0 else 'after'}"
            return f"{len(hits)} of {len(names)} prompts have the rewards of the prompt {where}: rewards are shifted"
    return None


# ---- on the first rollout of a run ---------------------------------------------------------------------------------------------------------


def check_first_rewards(setup: Setup, answers: list[Answer]) -> None:
    """Scores a first rollout again, with rows read anew from the data files by id. RuntimeError where its rewards belong to other answers.

    A reward function that does not say the same twice (a judge without a cache) is only warned about. A collective.
    """
    dist.rest()
    with dist.main_rank_first() as mine:
        if mine:
            _check_first_rewards(setup, answers)
    dist.beat()


def _check_first_rewards(setup: Setup, answers: list[Answer]) -> None:
    lines = [answer.line(0) for answer in answers]
    data = rows_by_id(setup.data_args.train_files, {line["id"] for line in lines})
    names, weights = setup.reward_args.names(), setup.reward_args.reward_weights
    first = score_again(setup.pool, names, lines, data)
    found, silent = disagreements(lines, first, weights)
    if silent:
        log.warning("reward check: %d rewards were there once and not the other time: they are not compared", silent)
    if found:
        second = score_again(setup.pool, names, lines, data)
        unsteady = {name for name in names for one, two in zip(first, second, strict=True) if not same(one[name], two[name])}
        for name in sorted(unsteady):
            log.warning("reward %s does not say the same of an answer twice: its rewards cannot be checked, nor reproduced", name)
        found, _ = disagreements(lines, first, weights, skip=unsteady)
    found += check_texts(lines, setup.tokenizer)
    if setup.reward_args.scale_rewards != "gdpo":
        found += wrong_order(lines)
    if found:
        raise RuntimeError(
            f"rewards do not match the answers of the first rollout: {len({(p['id'], p['sample']) for p in found})} of {len(lines)} answers, "
            f"for instance {shown(found[0])}. {shifted(lines, first) or 'The data file has other right answers, or the code that ties them is wrong'}."
        )
    log.info("reward check: %d answers scored again with the data's own rows, all rewards agree", len(lines))


def shown(found: dict) -> str:
    def value(x):
        return f"{x:.6g}" if isinstance(x, float) else repr(x)[:80]

    instead = "" if found["what"].startswith("advantage") else f" instead of {value(found['found'])}"
    return f"prompt {found['id']} sample {found['sample']}: {found['what']} {value(found['stored'])}{instead}"


# ---- the untrained model ---------------------------------------------------------------------------------------------------------------


def measure_baseline(setup: Setup, prompts: Prompts, num_rollouts: int) -> None:
    """Before the first step: answers of the untrained model to `baseline_prompts` of the prompts that the run will draw, spread evenly, sampled
    as in training, to rollouts/baseline-000000.jsonl. When STOP came, what is finished is kept for the next attempt. A collective."""
    path = rollout_path(setup.output_dir, "baseline", 0)
    if dist.broadcast_object(path.exists()):
        return
    drawn, epoch, offset = {}, 0, 0
    for _ in range(num_rollouts):
        questions, epoch, offset = prompts.next(epoch, offset, set())
        drawn |= {question.id: question for question in questions}
    questions = spread([*drawn.values()], setup.rollout_args.baseline_prompts)
    experience.sync(setup, 0)
    args, seed = setup.rollout_args, experience.rollout_seed(setup, 0)
    kept, _ = experience.keep_finished(setup, 0)
    answers, stopped = experience.generate(setup, questions, args.num_generations, args.temperature, seed, kept)
    if stopped:
        return experience.write_unfinished(setup, [answer.completion for answer in answers], questions, 0)
    experience.score(setup, answers)
    with dist.main_rank_first() as mine:
        if mine:
            write_lines(path, (answer.line(0) for answer in answers))
            rollout_path(setup.output_dir, "unfinished", 0).unlink(missing_ok=True)
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    log.info("baseline: the untrained model's mean reward on %d prompts is %.4f", len(questions), math.fsum(rewards) / max(len(rewards), 1))


def spread(values: list, count: int) -> list:
    """`count` of the values, evenly spaced, in their order."""
    if count >= len(values):
        return values
    return [values[index * len(values) // count] for index in range(count)]


def measure_afterwards(run: "Run", ids: dict[str, list[int]], args: argparse.Namespace) -> list[dict]:
    """Answers of the untrained model to prompts {id: ids}, by the run's sampling: lines with id, sample, completion, no rewards yet."""
    if run.config.get("debug_num_layers"):
        raise ValueError("the run trained some layers only (debug_num_layers); measure its baseline in it, with baseline_prompts")
    model = args.model or run.config["model_name_or_path"]
    sampling = generate.Sampling(
        run.config["num_generations"],
        run.config["temperature"],
        run.config["top_p"],
        run.config["max_completion_length"],
        run.config["seed"],
    )
    if args.server:
        source = generate.Servers(args.server, tokenizer=model)
        served, untrained = source.identity()["fingerprint"], checkpoint.fingerprint(model)
        if served not in (untrained, f"{untrained} + weights 0"):
            raise ValueError(f"{', '.join(args.server)} do not serve the untrained model {model}: fingerprint {served}, not {untrained}")
    else:
        source = generate.LocalModel(model, batch_size=run.config["rollout_batch_size"])
    chosen = spread([*ids], args.baseline_prompts)
    answers = generate.generate(
        source, [generate.Ask(name, ids[name]) for name in chosen], sampling, run.folder / "baseline" / "answers.jsonl"
    )
    return [line for name in chosen for line in answers[name]]


# ---- what a run looks like -----------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    folder: Path
    config: dict
    rewards: RewardArguments

    @classmethod
    def open(cls, folder: str) -> "Run":
        path = Path(folder) / "config.yaml"
        if not path.is_file():
            raise ValueError(f"{folder} is no run's folder: it has no config.yaml")
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if "reward_funcs" not in config:
            raise ValueError(f"{path} is not that of a GRPO run: it names no reward_funcs")
        return cls(Path(folder), config, RewardArguments(**{f.name: config[f.name] for f in fields(RewardArguments) if f.name in config}))

    def files(self, kind: str) -> list[Path]:
        return sorted((self.folder / "rollouts").glob(f"{kind}-*.jsonl"))


# ---- the command -----------------------------------------------------------------------------------------------------------------------


def read_rollout(path: Path) -> list[dict]:
    try:
        lines = read_lines(path)
        for line in lines:
            assert {"id", "sample", "completion", "rewards", "reward", "advantage"} <= set(line), f"a line has only {', '.join(line)}"
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"{path} is no file of answers: {error}") from error
    return lines


def load_tokenizer(run: Run):
    """The run's tokenizer; None (said) where its model has moved."""
    path = run.config["model_name_or_path"]
    if not (Path(path) / "config.json").is_file():
        log.warning("%s is gone: that texts are those of their ids is not checked", path)
        return None
    return AutoTokenizer.from_pretrained(path)


def pool_without(args: RewardArguments, skip: list[str]) -> tuple[RewardPool | None, list[str]]:
    """(a pool of the reward functions that are not skipped, None if there are none; the names of their components)."""
    kept = [index for index, name in enumerate(args.names()) if name not in skip]
    functions, weights = ([values[index] for index in kept] for values in (args.reward_funcs, args.reward_weights))
    args = replace(args, reward_funcs=functions, reward_weights=weights, accuracy_reward=None) if kept else None
    pool = RewardPool(args, hint="--skip NAME leaves a reward out of the audit") if kept else None
    return pool, [args.names()[index] for index in kept]


def audit_answers(
    run: Run, pool: RewardPool | None, scored: list[str], data: dict[str, dict[str, dict]]
) -> tuple[dict[str, dict[int, list[dict]]], dict]:
    """({kind: {step: lines}}, what was found) of all saved answers. scored: components of the pool. data: rows by id for each kind."""
    names, weights = run.rewards.names(), run.rewards.reward_weights
    tokenizer = load_tokenizer(run)
    lines_of: dict[str, dict[int, list[dict]]] = {kind: {} for kind in KINDS}
    found = {"answers": 0, "problems": [], "shifts": [], "not_compared": 0, "other_columns": []}
    paths = [(kind, path) for kind in KINDS for path in run.files(kind)]
    for kind, path in tqdm(paths, desc="rollouts", unit="file", disable=None):
        lines = read_rollout(path)
        if unknown := sorted({line["id"] for line in lines} - set(data[kind])):
            raise ValueError(f"{path}: {difference(unknown, 'are not in the data')}. Give the files of the run with --data")
        if other := next((line for line in lines if [*line["rewards"]] != names), None):
            raise ValueError(f"{path} was scored by {', '.join(other['rewards'])}; config.yaml names {', '.join(names)} (changed since)")
        again = score_again(pool, scored, lines, data[kind])
        problems, silent = disagreements(lines, again, weights)
        found["not_compared"] += silent
        if problems and (shift := shifted(lines, again)):
            found["shifts"].append(f"{path.name}: {shift}")
        problems += check_texts(lines, tokenizer) if tokenizer is not None else []
        if kind == "step" and run.rewards.scale_rewards != "gdpo":
            problems += wrong_order(lines)
        found["answers"] += len(lines)
        found["problems"] += [{"file": path.name} | problem for problem in problems]
        for line in lines:
            row = data[kind][line["id"]]
            if line["sample"] == 0 and (plain(columns_of(row)) != line["columns"] or plain(row["prompt"]) != line["prompt"]):
                found["other_columns"].append(f"{path.name} {line['id']}")
        lines_of[kind][int(path.stem.rpartition("-")[2])] = lines
    return lines_of, found


def audit(args: argparse.Namespace) -> dict:
    run = Run.open(args.run)
    if unknown := set(args.skip) - set(run.rewards.names()):
        raise ValueError(f"--skip {' '.join(sorted(unknown))}: the run's rewards are {', '.join(run.rewards.names())}")
    if not run.files("step"):
        raise ValueError(f"{run.folder}/rollouts holds no step-*.jsonl: the run has no answers yet")
    written = [run.folder / "audit.json", *generate.outputs(run.folder / "baseline" / "answers.jsonl")[:2]]
    refuse_overwriting(written, args.data or [])
    train = rows_by_id(args.data or run.config["train_files"])
    data = dict.fromkeys(KINDS, train)
    if run.files("eval"):
        data["eval"] = rows_by_id(args.data or run.config["eval_files"])
    pool, scored = pool_without(run.rewards, args.skip)
    with pool or contextlib.nullcontext():
        lines_of, found = audit_answers(run, pool, scored, data)
        baseline = [line for lines in lines_of["baseline"].values() for line in lines]
        if args.baseline and not baseline:
            ids = {line["id"]: line["prompt_ids"] for step in sorted(lines_of["step"]) for line in lines_of["step"][step]}
            baseline = measure_afterwards(run, ids, args)
            for line, rewards in zip(baseline, score_again(pool, scored, baseline, train), strict=True):
                line["reward"] = combine(rewards, run.rewards.reward_weights).reward
        failures = pool.failures if pool else 0
    rollouts = {step: lines + lines_of["filtered"].get(step, []) for step, lines in lines_of["step"].items()}
    untrained = by_prompt(baseline)
    start = by_prompt(lines_of["eval"].get(0, []))
    return {
        "run": str(run.folder),
        **found,
        "failed_calls": failures,
        "marks": compare_marks([line for lines in rollouts.values() for line in lines], train),
        "baseline": {"prompts": len(untrained), "reward": mean(line["reward"] for line in baseline)} if baseline else None,
        "rollouts": curve(rollouts, untrained),
        "evaluations": curve(lines_of["eval"], start, most=len(lines_of["eval"]) or 1),
    }


def print_report(result: dict, most: int) -> None:
    problems = result["problems"]
    print(f"{result['run']}: {result['answers']} saved answers scored again with the data's own rows")
    for found in problems[:most]:
        print(f"  {found['file']}: {shown(found)}")
    if len(problems) > most:
        print(f"  ... {len(problems) - most} more in audit.json")
    for shift in result["shifts"]:
        print(f"  {shift}")
    print(f"FAILED: {len(problems)} disagreements" if problems else "all rewards are those of their answers")
    if other := result["other_columns"]:
        print(f"note: {len(other)} saved rows are not what the data file holds now, for instance {other[0]}")
    if result["failed_calls"]:
        print(f"note: {result['failed_calls']} calls of reward functions failed now")
    if result["not_compared"]:
        print(f"note: {result['not_compared']} rewards were there in the run and not now, or the other way round: they are not compared")
    if marks := result["marks"]:
        print(f"\nthe same {marks['answers']} answers by exact match and by F1 ({marks['groups']} groups)")
        print(f"  mean                                {marks['exact']:.4f}  {marks['f1']:.4f}")
        print(f"  groups whose answers are all equal  {marks['tied_exact']:.4f}  {marks['tied_f1']:.4f}")
        print(
            f"  answers whose rank changes {marks['changed_ranks']:.4f}, wrong ones above their group's mean F1 {marks['paid_though_wrong']:.4f},"
        )
        print(f"  answers that name more letters than are right {marks['too_many']:.4f}")
    for title in ("rollouts", "evaluations"):
        if result[title]:
            print_curve(title, result[title])
    if result["baseline"]:
        print(
            f"baseline: {result['baseline']['reward']:.4f} on {result['baseline']['prompts']} prompts; differences are on those among them"
        )
    else:
        print("no baseline of the training prompts: baseline_prompts measures it before the first step, --baseline afterwards")


def print_curve(title: str, parts: list[dict]) -> None:
    beside = "the evaluation before the first step" if title == "evaluations" else "the untrained model"
    print(f"\n{title:<15}  answers   reward" + (f"   less {beside}, same prompts" if any("difference" in row for row in parts) else ""))
    for row in parts:
        steps = f"{row['from']}" if row["from"] == row["to"] else f"{row['from']} to {row['to']}"
        line = f"step {steps:<10}  {row['answers']:>7}  " + (f"{row['reward']:7.4f}" if row["reward"] is not None else "      -")
        if "difference" in row:
            interval = f"95 % {row['low']:+.4f} to {row['high']:+.4f}, " if "low" in row else ""
            line += f"   {row['difference']:+.4f} ({interval}{row['paired_prompts']} prompts)"
        print(line)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo.audit", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="output_dir of a GRPO run, also of one that still trains")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="the run's data files, where they have moved since")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="rewards not to score again, a judge that costs")
    parser.add_argument("--baseline", action="store_true", help="ask the untrained model the run's prompts, unless the run did itself")
    parser.add_argument("--baseline_prompts", type=int, default=200, help="so many of them at most, evenly spread (default 200)")
    parser.add_argument("--server", nargs="+", default=[], metavar="URL", help="vLLM servers of the untrained model, for --baseline")
    parser.add_argument("--model", metavar="FOLDER", help="the untrained model, where it has moved since")
    parser.add_argument("--show", type=int, default=20, help="disagreements to print (default 20); all are in RUN/audit.json")
    parser.add_argument("--json", action="store_true", help="print what is in RUN/audit.json instead of a report")
    args = parser.parse_args(arguments)
    try:
        if (args.server or args.model) and not args.baseline:
            raise ValueError("--server and --model go with --baseline")
        if args.baseline and args.skip:
            raise ValueError("--baseline needs every reward of its answers: leave out --skip")
        if args.baseline_prompts < 1:
            raise ValueError(f"--baseline_prompts is {args.baseline_prompts}; it must be at least 1")
        result = audit(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # a reward function that fails, servers that are gone
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_json(Path(args.run) / "audit.json", result)
    print(json.dumps(result, ensure_ascii=False, indent=1)) if args.json else print_report(result, args.show)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    dist.setup_logging()
    sys.exit(main())
