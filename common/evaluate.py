"""Multiple-choice questions and word problems: ask a model, mark the answers, compare two models on the same questions.

    python -m common.evaluate run --model runs/a/final --data questions.jsonl --output new.jsonl          # or --server http://node7:8000
    python -m common.evaluate score --predictions theirs.jsonl --data questions.jsonl --group_by year num_answers
    python -m common.evaluate compare --base base.jsonl --new new.jsonl --group_by year

`common/questions.py` says what a question and a prediction file are. Right means exactly the right letters. Exit code 2: wrong use;
1: servers that do not answer any more (the same command goes on).
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

from common import dist, generate
from common.answers import read_answer
from common.jsonl import refuse_overwriting, write_lines
from common.paired_tests import holm, mcnemar_exact, share_interval, wilson
from common.questions import Item, Marked, Predictions, difference, group_values, mark, read_items, read_predictions

log = logging.getLogger(__name__)


# ---- run -----------------------------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> dict:
    """Asks all questions and writes the prediction file, when all answers are there. What is made meanwhile is beside it."""
    output = Path(args.output)
    if output.suffix != ".jsonl":
        raise ValueError(f"output must be named *.jsonl, not {output}")
    refuse_overwriting(generate.outputs(output), args.data)
    kwargs = generate.template_kwargs(args.chat_template_kwargs)
    items, left_out = read_items(args.data, args.instruction, args.text_only)
    if left_out:
        log.info("%d questions need a picture (text_only: false) and are left out", left_out)
    asks = [generate.Ask(item.id, item.prompt, item.tools, kwargs | item.chat_template_kwargs) for item in items.values()]
    source, sampling = generate.source_of(args), generate.sampling_of(args)
    made = output.with_suffix(".answers.jsonl")
    answers = generate.generate(source, asks, sampling, made)
    model = generate.read_meta(made)["model"]
    write_lines(output, (prediction_line(items[ask.id], ask, answer, model, sampling) for ask in asks for answer in answers[ask.id]))
    log.info("%s: %d answers to %d questions", output, len(asks) * sampling.samples, len(asks))
    predictions = read_predictions([str(output)])
    return scores(predictions, mark(predictions, items), args.group_by)


def prediction_line(item: Item, ask: generate.Ask, answer: dict, model: str, sampling: generate.Sampling) -> dict:
    return {
        "id": item.id,
        "sample": answer["sample"],
        "prediction": read_answer(answer["completion"], item.gold, item.num_choices),
        "answer": item.answer,
        "completion": answer["completion"],
        "tokens": answer["tokens"],
        "finish_reason": answer["finish_reason"],
        "num_choices": item.num_choices,
        "columns": item.columns,
        "model": model,
        "prompt_hash": ask.prompt_hash,
        "temperature": sampling.temperature,
    }


# ---- score ---------------------------------------------------------------------------------------------------------------------------


def scores(predictions: Predictions, marked: dict[str, Marked], group_by: list[str]) -> dict:
    """Figures of all questions and of each group. Raises ValueError for a column that no question has."""
    lines = [line for lines in predictions.lines.values() for line in lines]
    rows = [figures(marked.values(), "all", "")]
    for column in group_by:
        rows += [figures([marked[name] for name in names], column, value) for value, names in group_values(marked, column).items()]
    return {
        "predictions": predictions.name,
        "samples": len(lines) // len(marked),
        "cut_off": sum(line.get("finish_reason") == "length" for line in lines),
        "groups": rows,
    }


def figures(marked: Iterable[Marked], column: str, value: str) -> dict:
    """accuracy with its 95 % interval, F1, share of answers that cannot be read; `majority`: accuracy of the most frequent of several samples."""
    marked = list(marked)
    n, answers = len(marked), sum(len(mark.right) for mark in marked)
    accuracy = sum(mark.accuracy for mark in marked) / n
    low, high = wilson(accuracy, n)
    result = {"column": column, "value": value, "questions": n, "right": sum(sum(mark.right) for mark in marked)}
    result |= {"accuracy": accuracy, "low": low, "high": high, "f1": sum(sum(mark.f1) for mark in marked) / answers}
    unreadable = sum(sum(mark.unreadable) for mark in marked)
    result |= {"unreadable": unreadable, "format_failure": unreadable / answers}
    return result | ({"majority": sum(mark.majority for mark in marked) / n} if answers > n else {})


def print_scores(result: dict) -> None:
    several = result["samples"] > 1
    print(f"{result['predictions']}: {result['samples']} answer{'s' if several else ''} a question")
    header = ["", "", "questions", "right", "accuracy", "95 %", "F1", "format failures"] + (["majority"] if several else [])
    lines = [header]
    for row in result["groups"]:
        interval = f"{100 * row['low']:.1f} to {100 * row['high']:.1f}"
        failures = f"{row['unreadable']} ({100 * row['format_failure']:.1f} %)"
        line = [row["column"], row["value"], str(row["questions"]), str(row["right"]), f"{100 * row['accuracy']:.2f} %", interval]
        lines.append([*line, f"{row['f1']:.4f}", failures, *([f"{100 * row['majority']:.2f} %"] if several else [])])
    print_table(lines)
    if result["cut_off"]:
        print(f"{result['cut_off']} answers were cut off at max_new_tokens")


def print_table(lines: list[list[str]]) -> None:
    """Two columns of text, then figures."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(cells).rstrip())


# ---- compare -------------------------------------------------------------------------------------------------------------------------


def compare(base: Predictions, new: Predictions, items: dict[str, Item] | None, group_by: list[str], subset: str | None) -> dict:
    """Both models' marks paired by id. ValueError where they answered other questions, or other right answers are in their files.

    subset base_wrong: only questions that the base got wrong. No test then: chosen by the base's errors, the new model can only gain.
    """
    warnings = check_same(base, new, items)
    marks = mark(base, items), mark(new, items)
    if subset == "base_wrong":
        wrong = [name for name, marked in marks[0].items() if not marked.majority]
        if not wrong:
            raise ValueError(f"{base.name} has no wrong answer: there is no subset to look at")
        marks = tuple({name: marked[name] for name in wrong} for marked in marks)
    result = {
        "base": base.name,
        "new": new.name,
        "subset": subset,
        "samples": len(next(iter(base.lines.values()))),
        "warnings": warnings,
        "all": pair(*marks, "all", "", tested=subset is None),
        "groups": [],
    }
    for column in group_by:
        groups = group_values(marks[0], column)
        pairs = [pair(*({n: m[n] for n in names} for m in marks), column, value, subset is None) for value, names in groups.items()]
        if subset is None:
            for row, adjusted in zip(pairs, holm([row["p"] for row in pairs]), strict=True):
                row["p_holm"] = adjusted
        result["groups"] += pairs
    return result


def check_same(base: Predictions, new: Predictions, items: dict[str, Item] | None) -> list[str]:
    """What makes the comparison one of more than the models; ValueError where nothing can be compared."""
    only_base = [name for name in base.lines if name not in new.lines]
    only_new = [name for name in new.lines if name not in base.lines]
    if only_base or only_new:
        found = [difference(ids, f"only in {which.name}") for ids, which in ((only_base, base), (only_new, new)) if ids]
        raise ValueError(f"a paired test needs the same questions: {'; '.join(found)}")
    firsts = {name: (lines[0], new.lines[name][0]) for name, lines in base.lines.items()}
    if items is None and base.has_gold and new.has_gold:
        if other := [name for name, (a, b) in firsts.items() if a["answer"] != b["answer"]]:
            raise ValueError(f"{difference(other, 'have another right answer in the two files')}. Give the questions with --data")
    samples = [len(next(iter(which.lines.values()))) for which in (base, new)]
    if samples[0] != samples[1]:
        raise ValueError(
            f"{base.name} has {samples[0]} answers to a question, {new.name} {samples[1]}. The most frequent of more answers is right more often, "
            "whatever the model: give as many --samples to both"
        )
    warnings = []
    for key, what in (("prompt_hash", "were asked with another prompt"), ("temperature", "were sampled at another temperature")):
        if other := [name for name, (a, b) in firsts.items() if key in a and key in b and a[key] != b[key]]:
            warnings.append(f"{difference(other, what)}: the difference is not the models' alone")
    return warnings


def pair(base: dict[str, Marked], new: dict[str, Marked], column: str, value: str, tested: bool) -> dict:
    """b, c and p by the majority of each question's samples; the difference, in shares of right answers, by all of them.

    Where b = c the difference of several samples need not be 0: two answers of which the first is right vote for it, and are half right.
    """
    verdicts = [(base[name].majority, new[name].majority) for name in base]
    b, c = verdicts.count((True, False)), verdicts.count((False, True))
    mean, low, high = share_interval([new[name].accuracy - base[name].accuracy for name in base])
    accuracies = [sum(mark.accuracy for mark in marked.values()) / len(marked) for marked in (base, new)]
    result = {"column": column, "value": value, "questions": len(base), "base_accuracy": accuracies[0], "new_accuracy": accuracies[1]}
    result |= {"difference": mean, "low": low, "high": high, "b": b, "c": c}
    if tested:
        return result | {"p": mcnemar_exact(b, c)}
    return result | dict(zip(("new_low", "new_high"), wilson(accuracies[1], len(new)), strict=True))


def print_comparison(result: dict) -> None:
    print(f"base {result['base']}\nnew  {result['new']}")
    for warning in result["warnings"]:
        print(f"warning: {warning}")
    rows = [result["all"], *result["groups"]]
    if result["subset"]:
        print("only questions that the base got wrong; no test: chosen like this, the new model can only gain")
        lines = [["", "", "questions", "now right", "share", "95 %"]]
        for row in rows:
            interval = f"{100 * row['new_low']:.1f} to {100 * row['new_high']:.1f}"
            lines.append(
                [row["column"], row["value"], str(row["questions"]), str(row["c"]), f"{100 * row['new_accuracy']:.2f} %", interval]
            )
        return print_table(lines)
    lines = [["", "", "questions", "base", "new", "difference", "95 %", "b", "c", "p", "p (Holm)"]]
    for row in rows:
        shares = [f"{100 * row[key]:.2f} %" for key in ("base_accuracy", "new_accuracy")]
        interval = f"{100 * row['low']:+.2f} to {100 * row['high']:+.2f}"
        adjusted = f"{row['p_holm']:.4g}" if "p_holm" in row else ""
        cells = [row["column"], row["value"], str(row["questions"]), *shares, f"{100 * row['difference']:+.2f}", interval]
        lines.append([*cells, str(row["b"]), str(row["c"]), f"{row['p']:.4g}", adjusted])
    print_table(lines)
    print("b: base right, new wrong; c: base wrong, new right; p: exact McNemar; Holm: over the groups of one column")
    if result["samples"] > 1:
        print(f"b, c, p: by the most frequent of a question's {result['samples']} answers; base, new and difference: by all of them")


# ---- command line --------------------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m common.evaluate", description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True)

    asking = commands.add_parser("run", help="ask a model and mark its answers; the same command goes on after a kill", allow_abbrev=False)
    generate.add_arguments(asking)
    asking.add_argument("--data", nargs="+", required=True, metavar="FILE", help="questions: JSON Lines or Parquet")
    asking.add_argument("--output", required=True, metavar="FILE.jsonl", help="the prediction file; answers meanwhile: FILE.answers.jsonl")
    asking.add_argument("--text_only", action="store_true", help="leave out questions with text_only: false, which need a picture")
    asking.add_argument("--instruction", help="instead of the shipped request for [ans]a,c[/ans], which is in the question's language")
    asking.add_argument(
        "--chat_template_kwargs", metavar="JSON", help="arguments of the chat template, e.g. '{\"enable_thinking\": false}'"
    )

    scoring = commands.add_parser("score", help="mark a prediction file", allow_abbrev=False)
    scoring.add_argument("--predictions", nargs="+", required=True, metavar="FILE", help="lines with id (or problem_id) and prediction")

    comparing = commands.add_parser("compare", help="two models on the same questions, paired by id", allow_abbrev=False)
    comparing.add_argument("--base", nargs="+", required=True, metavar="FILE", help="prediction file of the one")
    comparing.add_argument("--new", nargs="+", required=True, metavar="FILE", help="prediction file of the other")
    comparing.add_argument("--subset", choices=["base_wrong"], help="only questions that the base got wrong")

    for one in (scoring, comparing):
        one.add_argument("--data", nargs="+", metavar="FILE", help="questions, for prediction files without right answers")
    for one in (asking, scoring, comparing):
        one.add_argument(
            "--group_by", nargs="+", default=[], metavar="COLUMN", help="also by these columns: year, num_answers, file, any column"
        )
        one.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return top


def command(args: argparse.Namespace) -> dict:
    if args.command == "run":
        return run(args)
    items = read_items(args.data)[0] if args.data else None
    if args.command == "compare":
        return compare(read_predictions(args.base), read_predictions(args.new), items, args.group_by, args.subset)
    predictions = read_predictions(args.predictions)
    marked = mark(predictions, items)
    return scores(predictions, marked, args.group_by)


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        result = command(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # servers that are gone; what was made is kept
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result, ensure_ascii=False, indent=1))
    elif args.command == "compare":
        print_comparison(result)
    else:
        print_scores(result)
    return 0


if __name__ == "__main__":
    dist.setup_logging()
    sys.exit(main())
