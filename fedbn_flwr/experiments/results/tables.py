"""Tables of runs: frames of texts and numbers, a line for each method in each setting, or for each
run.

A new column is a line in the function of its table. `show.py` has the forms of a table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from fedbn_flwr.data.partition import about_absent
from fedbn_flwr.experiments.choice import ABOUT_EDGE, EDGE, chosen_of
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.recipes.paper import ADAPTED, Paper
from fedbn_flwr.experiments.results.rows import (
    CELL,
    Frame,
    column,
    finished,
    known,
    of_clients,
    options_of,
    outcome_of,
    pd,
    score_of,
    typical,
)
from fedbn_flwr.experiments.results.values import (
    AVERAGE,
    heading_of,
    is_share,
    number_text,
    numbers_of,
    scaled,
    values_of,
)

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
    """A number as it is read, the number that it is sorted by, and what stands behind its
    plus-minus sign.
    """

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
        is_number = self.frame.map(lambda cell: isinstance(cell, Number)).any()
        return {*is_number.index[is_number]}


def count(number: float | None, digits: int = 0) -> Number | str:
    """Return a number as a cell; an empty one if there is none."""
    if number is not None and known(number):
        return Number(f"{number:,.{digits}f}", number)
    return ""


def counts(numbers: Any, digits: int = 0) -> Any:
    """Return numbers as cells."""
    return pd.to_numeric(numbers, errors="coerce").map(partial(count, digits=digits))


class Lines:
    """The cells of methods in settings, by setting and label."""

    def __init__(self, runs: Frame, paper: Paper | None = None, digits: int = 2) -> None:
        self.runs = runs
        self.ended = finished(runs)
        self.paper = paper or Paper()
        score = score_of(runs)
        self.index = pd.MultiIndex.from_frame(runs[CELL].drop_duplicates())
        self.values = values_of(numbers_of(runs, self.paper.quantities, self.paper.rounds))
        quoted = [
            name for setting, label in self.index for name in self.paper.columns(label, setting)
        ]
        names = dict.fromkeys([*self.values.index.unique("column"), *quoted])
        #: the columns with numbers, that by which methods are compared first
        self.columns = sorted(names, key=lambda name: name != score) or [score]
        if is_share(score):
            self.digits = digits
        else:
            self.digits = ERROR_DIGITS
        failed = runs[runs["state"] == "failed"].drop_duplicates(CELL).to_dict("records")
        #: how runs failed, in words
        self.failures = {(run["setting"], run["label"]): outcome_of(run) for run in failed}

    def of(self, name: str) -> Frame:
        """Return the values of a column, by setting and label."""
        return self.values[self.values.index.get_level_values("column") == name].droplevel("column")

    def cells(self, name: str, spread: str = "deviation") -> Any:
        """Return the numbers of a column, with as many digits as the paper prints; of a method that
        failed none.
        """
        cells = {}
        for (setting, label), value in (
            self.of(name).drop(self.failures, errors="ignore").iterrows()
        ):
            numbers = [each.number(label, setting, name) for each in self.paper.reported]
            decimals = [
                len(number.printed.partition(" ")[0].partition(".")[2])
                for number in numbers
                if number
            ]
            shown = None
            if spread and value["number"] > 1:
                shown = value[spread]
            text = number_text(value["mean"], shown, max([self.digits, *decimals]))
            cells[setting, label] = Number(text, value["mean"], shown)
        return pd.Series(cells, self.index, dtype=object)

    def words(self, missing: str = "") -> Any:
        """Return why a method has no score."""
        states = self.runs.groupby(CELL, sort=False)["state"].agg(set)
        texts = []
        for key, own in states.items():
            word = missing
            if "unfinished" in own:
                word = "unfinished"
            elif "waiting" in own:
                word = "waiting"
            texts.append(self.failures.get(key, word))
        return pd.Series(texts, states.index, dtype=object)

    def compared(self) -> Frame:
        """Return the scores of settings with several methods, which are compared with the `first`
        one.
        """
        own = self.of(self.columns[0])
        labels = pd.Series(own.index.get_level_values("label"), own.index).groupby("setting")
        return own.assign(first=labels.transform("first"))[labels.transform("size") > 1]

    def differences(self, first: Number | str) -> Any:
        """Return the paired differences to the first method of the setting, whose own cell is
        `first`.
        """
        cells = {}
        for key, value in self.compared().drop(self.failures, errors="ignore").iterrows():
            half = None
            if value["pairs"] > 1:
                half = value["half_width"]
            text = number_text(value["difference"], half, self.digits, "+")
            own = Number(text, value["difference"], half) if value["pairs"] else ""
            if key[1] == value["first"]:
                cells[key] = first
            else:
                cells[key] = own
        return pd.Series(cells, self.index, dtype=object)

    def printed(self, name: str, heading: str = "{}") -> dict[str, Any]:
        """Return the paper's numbers; `heading` has a place for their place."""
        columns = {}
        for each in self.paper.reported:
            numbers = [each.number(label, setting, name) for setting, label in self.index]
            cells = [Number(number.printed, number.mean) if number else None for number in numbers]
            columns[heading.format(each.place)] = pd.Series(cells, self.index, dtype=object)
        return columns

    def mean(self, name: str, digits: int = 0) -> Any:
        """Return the mean of a column of the finished runs."""
        numbers = pd.to_numeric(column(self.ended, name), errors="coerce").dropna()
        place = [self.ended.loc[numbers.index, key] for key in CELL]
        return counts(numbers.groupby(place, sort=False).agg(fmean), digits).reindex(self.index)

    def chosen(self) -> Any:
        """Return the values that were chosen for the runs."""
        texts = pd.Series(_chosen(self.ended), self.ended.index, dtype=object)
        return (
            texts[texts != ""]
            .groupby([self.ended[key] for key in CELL])
            .first()
            .reindex(self.index)
        )

    def number(self) -> Any:
        """Return how many runs have come to their end."""
        return self.values["number"].groupby(level=CELL).max()

    def caption(self) -> str:
        """Return what the numbers are."""
        numbers = self.number().unique()
        caption = f"{heading_of(self.columns[0]).capitalize()}: mean"
        if max(numbers, default=1) > 1:
            if len(numbers) == 1:
                caption += f" of {max(numbers)} runs"
            caption += (
                " ± standard deviation; difference to the first method, paired by seed, ± "
                "half its 95 % interval"
            )
        if self.paper.reported:
            caption += "; beside it the numbers that are printed"
        return caption

    def footer(self, has_differences: bool = True) -> list[str]:
        """Return what a reader of the scores should know."""
        lines = []
        if has_differences and self.compared()["pairs"].max() == 1:
            lines = [WEAK]
        if any(EDGE in text for text in _chosen(self.ended)):
            lines.append(ABOUT_EDGE)
        if self.runs["setting"].nunique() == 1:
            lines += cautions(self.ended)
        return lines

    def frame(self, columns: Mapping[str, Any]) -> Frame:
        """Return these columns behind the names of the lines."""
        names = {
            "setting": self.index.get_level_values("setting"),
            "method": self.index.get_level_values("label"),
        }
        return pd.DataFrame({**names, **columns}, self.index)


def _chosen(runs: Frame) -> list[str]:
    chosen = []
    for run in runs.to_dict("records"):
        chosen.append(chosen_of({key: value for key, value in run.items() if known(value)}))
    return chosen


def results(runs: Frame, paper: Paper | None = None) -> Table:
    """Return the scores with their differences, and all other numbers, beside those of the
    paper.
    """
    lines = Lines(runs, paper)
    first, *others = lines.columns
    columns = {
        heading_of(first): lines.cells(first).fillna(lines.words("not recorded")),
        "difference": lines.differences(Number("baseline", 0.0)),
        **lines.printed(first),
    }
    for name in others:
        columns |= {
            heading_of(name): lines.cells(name),
            **lines.printed(name, heading_of(name) + " ({})"),
        }
    columns |= {"chosen": lines.chosen(), "runs": counts(lines.number())}
    return Table("results", lines.caption(), lines.frame(columns), lines.footer())


def comparison(runs: Frame, caption: str) -> Table:
    """Return the scores of methods, their differences to the first one, and what they cost."""
    lines = Lines(runs, digits=1)
    differences = lines.differences("")
    chosen = lines.chosen()
    firsts = lines.compared()["first"].reindex(lines.index)
    columns = {
        heading_of(lines.columns[0]): lines.cells(lines.columns[0]).fillna(
            lines.words("not recorded")
        ),
        **{f"vs {first}": differences.where(firsts == first) for first in firsts.dropna().unique()},
        "personal": lines.cells("accuracy-personal", ""),
        "mean BN": lines.cells("accuracy-mean-bn", ""),
        "chosen": chosen,
        "lr": pd.Series({key: _rate(own) for key, own in runs.groupby(CELL)}, lines.index).where(
            chosen.isna()
        ),
        "MB sent": lines.mean("MB sent", 1),
        "exchanges": lines.mean("exchanges"),
        "s": lines.mean("seconds", 1),
    }
    return Table("results", caption, lines.frame(columns), lines.footer())


def _rate(runs: Frame) -> Number | str:
    """Return the learning rate of runs that differ by their seeds."""
    rate = next(iter(column(runs, "lr").dropna()), None) or options_of(runs)[0].get("lr")
    return Number(f"{rate:g}", rate) if rate else ""


def reproduced(runs: Frame, paper: Paper, caption: str) -> Table:
    """Return the numbers beside those of the paper, one a line."""
    lines = Lines(runs, paper)
    parts = []
    for name in lines.columns:
        part = lines.frame(
            {
                "quantity": name,
                "chosen": lines.chosen(),
                "here": lines.cells(name),
                **lines.printed(name),
            }
        )
        quoted = [name in paper.columns(label, setting) for setting, label in lines.index]
        parts.append(part[lines.index.isin(lines.of(name).index) | quoted])
    first = lines.frame({"here": None, **lines.printed(lines.columns[0])})
    parts.append(first.drop([key for part in parts for key in part.index]))  # nothing is recorded
    frame = pd.concat([part.loc[part.index == key] for key in lines.index for part in parts])
    frame["quantity"] = frame["quantity"].where(
        frame.groupby(level=CELL)["method"].transform("size") > 1
    )
    frame["here"] = frame["here"].fillna(lines.words().reindex(frame.index))
    return Table("results", caption, frame, lines.footer(has_differences=False))


def by_domain(runs: Frame, caption: str) -> Table:
    """Return the accuracy of every domain, and their mean."""
    lines = Lines(runs, digits=1)
    names = dict.fromkeys(name for own in column(runs, "domain-accuracy").dropna() for name in own)
    columns = {**{name: lines.cells(name, "") for name in names}, "mean": lines.cells(AVERAGE, "")}
    return Table("results", caption, lines.frame(columns))


def unseen(runs: Frame, caption: str) -> Table:
    """Return the scores on domains that nobody trained with, each with half its 95 % interval."""
    lines = Lines(_by_unseen_domain(runs), digits=1)
    names = {
        name: heading_of(name).removeprefix("accuracy ").removesuffix(", %")
        for name in ("accuracy-mean-bn", *ADAPTED)
    }
    columns = {
        "as it is": lines.cells(lines.columns[0], "interval").fillna(lines.words("not recorded")),
        **{text: lines.cells(name, "interval") for name, text in names.items()},
        "chosen": lines.chosen(),
        "s": lines.mean("seconds", 1),
    }
    return Table("results", caption, lines.frame(columns))


def _by_unseen_domain(runs: Frame) -> Frame:
    """Return runs with the domain that nobody trained with as setting; of several domains, also a
    method's means.
    """
    parts = (
        runs["label"]
        .str.extract(r"^(?P<name>.*?)(?::unseen=(?P<domain>[^:]*)(?P<more>.*))?$")
        .fillna("")
    )
    domains = parts["domain"].where(
        parts["domain"] != "", column(runs, "unseen").astype(object).fillna("")
    )
    named = runs.assign(setting=domains, label=parts["name"] + parts["more"])
    means = []
    for _, own in named.groupby(["label", "seed"], sort=False):
        if len(own) == domains.nunique() > 1:
            # the mean of runs of which one failed or is missing is no number
            first = own.loc[(own["state"] == "finished").idxmin()].dropna()
            numbers = own[first.index].select_dtypes("float").dropna(axis="columns")
            means.append({**first, **numbers.apply(fmean), "setting": "mean"})
    return pd.concat([named, pd.DataFrame(means)], ignore_index=True)


def costs(runs: Frame) -> Table:
    """Return what the runs sent, and their time."""
    lines = Lines(runs)
    columns = {
        "rounds": lines.mean("rounds"),
        "exchanges": lines.mean("exchanges"),
        "MB sent": lines.mean("MB sent", 1),
        "MB a round, as papers count": lines.mean("MB a round", 2),
        "seconds": lines.mean("seconds", 1),
    }
    return Table("costs", "What the runs sent, and their time", lines.frame(columns))


def all_runs(runs: Frame) -> Table:
    """Return a line for each run: how far it is, and what it has come to."""
    ended = finished(runs).reindex(runs.index)
    score = score_of(runs)
    columns = {
        "setting": runs["setting"],
        "method": runs["label"],
        "seed": counts(runs["seed"]),
        "state": runs["state"].where(runs["error"] == "", "failed: " + runs["error"]),
        "rounds done": [count(len(read_rounds(Path(folder)))) for folder in runs["folder"]],
        "of": [count(own.get("rounds")) for own in options_of(runs)],
        "learning rate": [_rate(runs.loc[[run]]) for run in runs.index],
        "chosen": _chosen(ended),
        heading_of(score): counts(scaled(ended, score), 2 if is_share(score) else ERROR_DIGITS),
        "exchanges": counts(column(ended, "exchanges")),
        "MB sent": counts(ended["MB sent"], 1),
        "seconds": counts(column(ended, "seconds"), 1),
        "folder": [Path(folder).name for folder in runs["folder"]],
    }
    return Table("runs", "All runs", pd.DataFrame(columns, runs.index))


def cautions(runs: Frame) -> list[str]:
    """Return what is to be said of the data of finished runs."""
    first = typical(runs) if len(runs) else {}
    left = {node for own in column(runs, "left-out").dropna() for node in own}
    absent = first.get("absent-classes")
    lines = list[str]()
    if isinstance(absent, list):
        lines = [f"Caution: {about_absent(absent, first['partition'], first['clients'])}."]
    sites = first.get("sites")
    if isinstance(sites, dict) and 0 < len(sites) < first.get("clients", 0):
        lines.append(
            f"Caution: scores are means over {', '.join(sites)}, {len(sites)} of "
            f"{first['clients']} sites."
        )
    if left:
        lines.append(f"Caution: {len(left)} nodes were missing in rounds; rounds.jsonl names them.")
    ways = of_clients(runs).groupby(column(runs, "trained-by"), sort=False)["label"].unique()
    if len(ways) > 1:
        each = "; ".join(f"{way} ({', '.join(labels)})" for way, labels in ways.items())
        lines.append(f"Seconds are of runs trained in different ways: {each}.")
    return lines
