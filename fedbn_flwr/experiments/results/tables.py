"""Tables of runs: frames of texts and numbers, a line for each method in each setting, or for each run.

A new column is a line in the function of its table. `show.py` has the forms of a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from fedbn_flwr.experiments.choice import ABOUT_EDGE, EDGE, chosen_of, metric_of
from fedbn_flwr.experiments.material import about_absent
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.recipes.paper import ADAPTED, Paper
from fedbn_flwr.experiments.results.rows import (
    CELL,
    Frame,
    column,
    finished,
    known,
    options_of,
    outcome_of,
    pd,
    rounds_of,
    score_of,
    typical,
)
from fedbn_flwr.experiments.results.values import (
    AVERAGE,
    heading_of,
    is_share,
    number_text,
    numbers_of,
    scale_of,
    values_of,
)
from fedbn_flwr.traffic.counting_grid import MEGABYTE

#: digits of errors, which may be small
ERROR_DIGITS = 4
#: said of results that have one run each
WEAK = "One seed: a difference may be chance."
#: columns that say which line it is; a line with these alone is left out
NAMES = ("setting", "method", "quantity")
#: columns that are left out if all lines have the same
ALIKE = ("lr", "runs")


@dataclass(frozen=True)
class Number:
    """A number as it is read, the number that it is sorted by, and what stands behind its plus-minus sign."""

    text: str
    value: float
    spread: float | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """A frame whose cells are texts or a `Number`, without empty columns and lines."""

    name: str
    caption: str
    frame: Frame
    footer: Sequence[str] = ()

    def __post_init__(self) -> None:
        frame = self.frame.astype(object).fillna("")
        frame = frame[(frame.drop(columns=[*NAMES], errors="ignore") != "").any(axis=1)]
        alike = [name for name in ALIKE if name in frame and frame[name].map(str).nunique() == 1]
        frame = frame.drop(columns=alike)
        object.__setattr__(self, "frame", frame.loc[:, (frame != "").any()])

    @property
    def numeric(self) -> set[str]:
        """The columns of numbers."""
        return {name for name, cells in self.frame.items() if any(isinstance(cell, Number) for cell in cells)}


def count(number: float | None, digits: int = 0) -> Number | str:
    """Return a number as a cell; an empty one if there is none."""
    return Number(f"{number:,.{digits}f}", number) if known(number) and number is not None else ""


class Lines:
    """The cells of methods in settings, by setting and label.

    `spread` is what stands behind a number: the deviation of its runs, or half the interval of its mean.
    """

    def __init__(self, runs: Frame, paper: Paper | None = None, digits: int = 2, spread: str = "deviation") -> None:
        self.runs, self.ended, self.paper, score = runs, finished(runs), paper or Paper(), score_of(runs)
        self.index = pd.MultiIndex.from_frame(runs[CELL].drop_duplicates())
        self.values = values_of(numbers_of(runs, self.paper.quantities, self.paper.rounds))
        quoted = [name for setting, label in self.index for name in self.paper.columns(label, setting)]
        names = dict.fromkeys([*self.values.index.unique("column"), *quoted])
        #: all columns, that by which methods are compared first
        self.columns = sorted(names, key=lambda name: name != score) or [score]
        self.digits = digits if is_share(score) else ERROR_DIGITS
        failed = runs[runs["state"] == "failed"].groupby(CELL, sort=False).head(1)
        #: how a run failed, in words
        self.failures = {tuple(run[key] for key in CELL): outcome_of(run) for run in failed.to_dict("records")}
        cells = [self._cell(*key, own[spread], own) for key, own in self.values.iterrows()]
        shown = pd.Series(cells, self.values.index, dtype=object).unstack("column")
        #: a column for each of `columns`
        self.cells = shown.reindex(self.index).reindex(columns=self.columns).astype(object).fillna("")

    def _cell(self, setting: str, column: str, label: str, spread: float, value: Any) -> Number | str:
        """Return the number of the runs, with as many digits as the paper prints."""
        if (setting, label) in self.failures:
            return ""
        printed = [each.number(label, setting, column) for each in self.paper.reported]
        digits = [len(number.printed.partition(" ")[0].partition(".")[2]) for number in printed if number]
        shown = spread if value["number"] > 1 else None
        return Number(number_text(value["mean"], shown, max([self.digits, *digits])), value["mean"], shown)

    def plain(self, name: str) -> Any:
        """Return the cells of a column without what stands behind the plus-minus sign."""
        return column(self.cells, name).map(_without_spread)

    def scores(self, missing: str = "not recorded") -> Any:
        """Return the score of each method, or why there is none."""
        states = self.runs.groupby(CELL, sort=False)["state"].agg(set)
        words = [
            next((each for each in ("unfinished", "waiting") if each in states[key]), missing) for key in self.index
        ]
        texts = [self.failures.get(key, word) for key, word in zip(self.index, words, strict=True)]
        scores = self.cells[self.columns[0]]
        return scores.where(scores != "", pd.Series(texts, self.index))

    def firsts(self) -> dict[str, str]:
        """Return by setting the method that differences are to, if there is another one."""
        labels = dict[str, list[str]]()
        for setting, name, label in self.values.index:
            labels.setdefault(setting, []).extend([label] if name == self.columns[0] else [])
        return {setting: own[0] for setting, own in labels.items() if len(own) > 1}

    def differences(self, first: Number | str) -> Any:
        """Return the paired differences to the first method of the setting, whose own cell is `first`."""
        firsts, cells = self.firsts(), {}
        for (setting, name, label), value in self.values.iterrows():
            if (
                name == self.columns[0]
                and setting in firsts
                and value["pairs"]
                and (setting, label) not in self.failures
            ):
                half = value["half_width"] if value["pairs"] > 1 else None
                text = number_text(value["difference"], half, self.digits, "+")
                is_first = label == firsts[setting]
                cells[setting, label] = first if is_first else Number(text, value["difference"], half)
        return pd.Series(cells, self.index, dtype=object)

    def printed(self, column: str, heading: str = "{}") -> dict[str, Any]:
        """Return the paper's numbers; `heading` has a place for their place."""
        columns = {}
        for each in self.paper.reported:
            numbers = [each.number(label, setting, column) for setting, label in self.index]
            cells = [Number(number.printed, number.mean) if number else "" for number in numbers]
            columns[heading.format(each.place)] = pd.Series(cells, self.index)
        return columns

    def mean(self, numbers: Any, digits: int = 0) -> Any:
        """Return the mean of a number of the finished runs."""
        numbers = pd.to_numeric(numbers, errors="coerce").dropna()
        place = [self.ended.loc[numbers.index, key] for key in CELL]
        return numbers.groupby(place, sort=False).agg(fmean).map(partial(count, digits=digits)).reindex(self.index)

    def chosen(self) -> Any:
        """Return the values that were chosen for the runs."""
        texts = pd.Series([chosen_of(run) for run in _records(self.ended)], self.ended.index, dtype=object)
        return texts[texts != ""].groupby([self.ended[key] for key in CELL]).first().reindex(self.index)

    def caption(self) -> str:
        """Return what the numbers are."""
        numbers = self.values["number"].groupby(level=[*CELL]).max().unique()
        caption = f"{heading_of(self.columns[0]).capitalize()}: mean"
        if max(numbers, default=1) > 1:
            caption += f" of {max(numbers)} runs" if len(numbers) == 1 else ""
            caption += " ± standard deviation; difference to the first method, paired by seed, ± half its 95 % interval"
        return caption + "; beside it the numbers that are printed" * bool(self.paper.reported)

    def footer(self, has_differences: bool = True) -> list[str]:
        """Return what a reader of the scores should know."""
        own = self.values[self.values.index.get_level_values("column") == self.columns[0]]
        pairs = own.loc[own.index.get_level_values("setting").isin(self.firsts()), "pairs"].max()
        lines = [WEAK] if has_differences and pairs == 1 else []
        lines += [ABOUT_EDGE] * any(EDGE in text for text in self.chosen().fillna(""))
        return lines + (cautions(self.ended) if self.runs["setting"].nunique() == 1 else [])

    def table(self, name: str, caption: str, columns: Any, footer: Sequence[str] = ()) -> Table:
        """Return a table with these columns behind the names of the lines."""
        names = {"setting": self.index.get_level_values("setting"), "method": self.index.get_level_values("label")}
        return Table(name, caption, pd.DataFrame({**names, **columns}, self.index), footer)


def _without_spread(cell: Any) -> Any:
    return Number(cell.text.partition(" ±")[0], cell.value) if isinstance(cell, Number) else cell


def _records(runs: Frame) -> list[dict[str, Any]]:
    """Return runs without what they lack."""
    return [{key: value for key, value in run.items() if known(value)} for run in runs.to_dict("records")]


def results(runs: Frame, paper: Paper | None = None) -> Table:
    """Return the scores with their differences, and all other numbers, beside those of the paper."""
    lines = Lines(runs, paper)
    first, *others = lines.columns
    columns = {heading_of(first): lines.scores(), "difference": lines.differences(Number("baseline", 0.0))}
    columns |= lines.printed(first)
    for name in others:
        columns |= {heading_of(name): lines.cells[name], **lines.printed(name, heading_of(name) + " ({})")}
    number = lines.values["number"].groupby(level=[*CELL]).max().map(count).reindex(lines.index)
    columns |= {"chosen": lines.chosen(), "runs": number}
    return lines.table("results", lines.caption(), columns, lines.footer())


def comparison(runs: Frame, caption: str) -> Table:
    """Return the scores of methods, their differences to the first one, and what they cost."""
    lines = Lines(runs, digits=1)
    differences, firsts, chosen = lines.differences(""), lines.firsts(), lines.chosen()
    versus = {first: [firsts.get(setting) == first for setting, _ in lines.index] for first in firsts.values()}
    rates = {key: _rate(own) for key, own in runs.groupby(CELL, sort=False)}
    columns = {
        heading_of(lines.columns[0]): lines.scores(),
        "personal": lines.plain("accuracy-personal"),
        "mean BN": lines.plain("accuracy-mean-bn"),
        **{f"vs {first}": differences.where(here, "") for first, here in versus.items()},
        "chosen": chosen,
        "lr": pd.Series(rates, lines.index).where(chosen.isna(), ""),
        "MB sent": lines.mean(column(lines.ended, "payload-bytes") / MEGABYTE, 1),
        "exchanges": lines.mean(column(lines.ended, "exchanges")),
        "s": lines.mean(column(lines.ended, "seconds"), 1),
    }
    return lines.table("results", caption, columns, lines.footer())


def _rate(runs: Frame) -> Number | str:
    """Return the learning rate of runs that differ by their seeds."""
    rate = next(iter(column(runs, "lr").dropna()), None) or options_of(runs)[0].get("lr")
    return Number(f"{rate:g}", rate) if rate else ""


def reproduced(runs: Frame, paper: Paper, caption: str) -> Table:
    """Return the numbers beside those of the paper, one a line."""
    lines, parts = Lines(runs, paper), []
    chosen, words = lines.chosen(), lines.scores("")
    recorded = {key: [] for key in lines.index}
    for setting, name, label in lines.values.index:
        recorded[setting, label].append(name)
    for (setting, label), own in recorded.items():
        quoted = paper.columns(label, setting)
        names = [name for name in lines.columns if name in own or name in quoted] or lines.columns[:1]
        for name in names:
            here = lines.cells.at[(setting, label), name]
            state = words[setting, label]
            here = here if here != "" or isinstance(state, Number) else state
            printed = {at: cells[setting, label] for at, cells in lines.printed(name).items()}
            quantity = name if len(names) > 1 else ""
            place = {"setting": setting, "method": label, "quantity": quantity, "chosen": chosen[setting, label]}
            parts.append({**place, "here": here, **printed})
    return Table("results", caption, pd.DataFrame(parts), lines.footer(has_differences=False))


def by_domain(runs: Frame, caption: str) -> Table:
    """Return the accuracy of every domain, and their mean."""
    lines = Lines(runs, digits=1)
    names = dict.fromkeys(name for own in column(runs, "domain-accuracy").dropna() for name in own)
    columns = {**{name: lines.plain(name) for name in names}, "mean": lines.plain(AVERAGE)}
    return lines.table("results", caption, columns)


def unseen(runs: Frame, caption: str) -> Table:
    """Return the scores on domains that nobody trained with, each with half its 95 % interval."""
    lines = Lines(_by_unseen_domain(runs), digits=1, spread="interval")
    names = {name: name.replace("accuracy-", "") for name in ("accuracy-mean-bn", *ADAPTED)}
    others = {text.replace("-bn", "-BN").replace("-", " "): column(lines.cells, name) for name, text in names.items()}
    seconds = lines.mean(column(lines.ended, "seconds"), 1)
    return lines.table(
        "results", caption, {"as it is": lines.scores(), **others, "chosen": lines.chosen(), "s": seconds}
    )


def _by_unseen_domain(runs: Frame) -> Frame:
    """Return runs with the domain that nobody trained with as setting; of several domains, also a method's means."""
    parts = runs["label"].str.extract(r"^(?P<name>.*?)(?::unseen=(?P<domain>[^:]*)(?P<more>.*))?$").fillna("")
    domains = parts["domain"].where(parts["domain"] != "", column(runs, "unseen"))
    named = runs.assign(setting=domains.fillna(""), label=parts["name"] + parts["more"])
    means = []
    for _, own in named.groupby(["label", "seed"], sort=False):
        if len(own) == named["setting"].nunique() > 1:
            # the mean of runs of which one failed or is missing is no number
            first = next((run for run in _records(own) if run["state"] != "finished"), _records(own)[0])
            numbers = own.select_dtypes("float").mean(skipna=False).dropna()
            means.append(
                {**first, **{name: fmean(own[name]) for name in numbers.index if name in first}, "setting": "mean"}
            )
    return pd.concat([named, pd.DataFrame(means)], ignore_index=True)


def costs(runs: Frame) -> Table:
    """Return what the runs sent, and their time."""
    lines = Lines(runs)
    ended, papers = lines.ended, column(lines.ended, "paper-bytes")
    columns = {
        "rounds": lines.mean(ended["rounds"]),
        "exchanges": lines.mean(column(ended, "exchanges")),
        "MB sent": lines.mean(column(ended, "payload-bytes") / MEGABYTE, 1),
        "MB a round, as papers count": lines.mean(papers / MEGABYTE / ended["rounds"], 2),
        "seconds": lines.mean(column(ended, "seconds"), 1),
    }
    return lines.table("costs", "What the runs sent, and their time", columns)


def all_runs(runs: Frame) -> Table:
    """Return a line for each run: how far it is, and what it has come to."""
    ended, options = finished(runs).reindex(runs.index), pd.Series(options_of(runs), runs.index)
    metric = metric_of(_records(runs)[0])
    frame = pd.DataFrame(
        {
            "setting": runs["setting"],
            "method": runs["label"],
            "seed": runs["seed"].map(count),
            "state": runs["state"].where(runs["error"] == "", "failed: " + runs["error"]),
            "rounds done": [count(len(read_rounds(Path(folder)))) for folder in runs["folder"]],
            "of": [count(own.get("rounds")) for own in options],
            "learning rate": [_rate(runs.loc[[run]]) for run in runs.index],
            "chosen": pd.Series([chosen_of(run) for run in _records(ended)], ended.index),
            heading_of(metric): _counts(
                scale_of(metric) * column(ended, metric), 2 if is_share(metric) else ERROR_DIGITS
            ),
            "exchanges": _counts(column(ended, "exchanges")),
            "MB sent": _counts(column(ended, "payload-bytes") / MEGABYTE, 1),
            "seconds": _counts(column(ended, "seconds"), 1),
            "folder": [Path(folder).name for folder in runs["folder"]],
        }
    )
    return Table("runs", "All runs", frame)


def _counts(numbers: Any, digits: int = 0) -> Any:
    return pd.to_numeric(numbers, errors="coerce").map(partial(count, digits=digits))


def curve_table(runs: Frame) -> Table:
    """Return the score of every run over its rounds, exchanges, bytes and seconds: a line for each round with one."""
    score, rounds = score_of(runs), rounds_of(runs)
    sent = column(rounds, "payload-bytes-down").fillna(0) + column(rounds, "payload-bytes-up").fillna(0)
    counted = {"exchanges": column(rounds, "exchanges"), "sent": sent, "seconds": column(rounds, "seconds")}
    sums = pd.DataFrame(counted).fillna(0).groupby(column(rounds, "run")).cumsum()
    frame = pd.DataFrame(
        {
            "setting": column(rounds, "setting"),
            "method": column(rounds, "label"),
            "seed": column(rounds, "seed").map(count),
            "round": column(rounds, "round").map(count),
            heading_of(score): _counts(scale_of(score) * pd.to_numeric(column(rounds, score)), 2),
            "exchanges": _counts(sums["exchanges"]),
            "MB sent": _counts(sums["sent"] / MEGABYTE, 1),
            "seconds": _counts(sums["seconds"], 1),
        }
    )
    return Table("curves", "The score over the rounds", frame[frame[heading_of(score)] != ""])


def cautions(runs: Frame) -> list[str]:
    """Return what is to be said of the data of finished runs."""
    first = typical(runs) if len(runs) else {}
    absent, left = first.get("absent-classes"), {node for own in column(runs, "left-out").dropna() for node in own}
    lines = (
        [f"Caution: {about_absent(absent, first['partition'], first['clients'])}."] if isinstance(absent, list) else []
    )
    return lines + [f"Caution: {len(left)} nodes were missing in rounds; rounds.jsonl names them."] * bool(left)
