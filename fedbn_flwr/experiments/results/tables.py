"""Tables of runs: columns of texts and of numbers, a line for each method in each setting, or for
each run.

A new column is a line in the function of its table. `show.py` has the forms of a table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedbn_flwr.data.partition import about_absent
from fedbn_flwr.experiments.choice import ABOUT_EDGE, EDGE, chosen_of
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.recipes.paper import OF_ONE_MODEL, UNPRINTED, Number, Paper
from fedbn_flwr.experiments.results.rows import (
    CELL,
    Frame,
    column,
    finished,
    known,
    of_clients,
    options_of_runs,
    outcome_of,
    pd,
    score_of,
    typical,
)
from fedbn_flwr.experiments.results.values import (
    AVERAGE,
    capitalized,
    domains_of,
    heading_of,
    is_share,
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


class TableCell(NamedTuple):
    """A cell as it is read, and the number that it is sorted by, if it is one."""

    heading: str
    text: str
    number: float | None


def numbers(
    values: Any, form: str | list[str] = ",.0f", spread: Any = nan, text: Any = ""
) -> Frame:
    """Return a column of numbers.

    Each has its `spread`, the `form` that `format` writes both in, and the `text` that is written
    in its place, if there is one.
    """
    values = pd.to_numeric(values, errors="coerce")
    return pd.DataFrame({"number": values, "spread": spread, "form": form, "text": text})


def table_of(columns: Mapping[str, Any], index: Any) -> Frame:
    """Return the frame of a `Table`: each column, of texts or of `numbers`, under its heading."""
    frames = {}
    for heading, own in columns.items():
        frames[heading] = own
        if not isinstance(own, pd.DataFrame):
            frames[heading] = pd.DataFrame({"text": own}, index)
    return pd.concat(frames, axis=1)


def texts_of(frame: Frame) -> Frame:
    """Return the cells of a table's frame as they are read."""
    headings = frame.columns.unique(0)
    texts = {heading: _written(frame[heading]) for heading in headings}
    return pd.DataFrame(texts, frame.index, dtype=object)


def _written(own: Frame) -> list[str]:
    """Return the texts of a column."""
    if "number" not in own:
        return list(own["text"].fillna("").map(str))
    texts = []
    for number, spread, form, text in own.itertuples(index=False):
        written = text
        if not text and known(number):
            written = format(number, form)
            if known(spread):
                written += f" ± {format(spread, form.removeprefix('+'))}"
        texts.append(written)
    return texts


@dataclass(frozen=True)
class Table:
    """A table without empty columns and lines."""

    name: str
    caption: str
    #: what `table_of` returns
    frame: Frame
    footer: Sequence[str] = ()
    #: the cells as they are read
    texts: Frame = field(init=False)

    def __post_init__(self) -> None:
        texts = texts_of(self.frame)
        told = (texts.drop(columns=[*NAMES], errors="ignore") != "").any(axis=1)
        shown = []
        for heading, own in texts[told].items():
            if (own != "").any() and not (heading in ALIKE and own.nunique() == 1):
                shown.append(heading)
        object.__setattr__(self, "frame", self.frame.loc[told, shown])
        object.__setattr__(self, "texts", texts.loc[told, shown])

    @cached_property
    def numeric(self) -> set[str]:
        """The headings of columns with numbers."""
        there = self.frame.notna().any()
        return {heading for heading, part in there.index[there] if part == "number"}

    def lines(self) -> Iterator[list[TableCell]]:
        """Return the cells of each line."""
        numbers = {heading: list(self.frame[heading, "number"]) for heading in self.numeric}
        for place, line in enumerate(self.texts.to_dict("records")):
            cells = []
            for heading, text in line.items():
                number = None
                if heading in numbers and known(numbers[heading][place]):
                    number = numbers[heading][place]
                cells.append(TableCell(heading, text, number))
            yield cells


class Lines:
    """The columns of methods in settings, with a line for each setting and label."""

    def __init__(self, runs: Frame, paper: Paper | None = None, digits: int = 2) -> None:
        self.runs = runs
        self.ended = finished(runs)
        self.paper = paper or Paper()
        #: by which methods are compared
        self.score = score_of(runs)
        self.domains = (*domains_of(runs), AVERAGE)
        self.index = pd.MultiIndex.from_frame(runs[CELL].drop_duplicates())
        self.values = values_of(numbers_of(runs, self.paper.quantities, self.paper.rounds))
        quoted = [
            name for setting, label in self.index for name in self.paper.columns(label, setting)
        ]
        names = dict.fromkeys([*self.values.index.unique("column"), *quoted])
        #: the columns with numbers, that by which methods are compared first
        self.columns = sorted(names, key=lambda name: (name != self.score, name != AVERAGE))
        self.columns = self.columns or [self.score]
        self.digits = digits
        if not is_share(self.score):
            self.digits = ERROR_DIGITS
        failed = runs[runs["state"] == "failed"].drop_duplicates(CELL).to_dict("records")
        #: how runs failed, in words
        self.failures = {(run["setting"], run["label"]): outcome_of(run) for run in failed}

    def heading(self, name: str) -> str:
        """Return a column's name with its unit; of a domain that of the score."""
        if name not in self.domains:
            return heading_of(name)
        return f"{name}, %" if is_share(self.score) else name

    def of(self, name: str) -> Frame:
        """Return the values of a column, by setting and label."""
        return self.values[self.values.index.get_level_values("column") == name].droplevel("column")

    def cells(self, name: str, spread: str = "deviation") -> Frame:
        """Return the numbers of a column, with as many digits as the paper prints; of a method that
        failed none.
        """
        own = self.of(name).drop(self.failures, errors="ignore").reindex(self.index)
        shown = own[spread].where(own["number"] > 1) if spread else nan
        forms = []
        for setting, label in self.index:
            digits = max(self.digits, self.paper.digits(label, setting, name))
            forms.append(f"z.{digits}f")
        return numbers(own["mean"], forms, shown)

    def scores(self, spread: str = "deviation") -> Frame:
        """Return the numbers by which methods are compared; in words why a method has none."""
        cells = self.cells(self.columns[0], spread)
        return cells.assign(text=self.words("not recorded").where(cells["number"].isna(), ""))

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
        """Return the scores that are compared with another one: that of the setting's `first`
        method.
        """
        own = self.of(self.columns[0])
        labels = pd.Series(own.index.get_level_values("label"), own.index)
        own = own.assign(first=labels.groupby("setting").transform("first"))
        return own[labels != own["first"]].drop(self.failures, errors="ignore")

    def differences(self) -> dict[str, Frame]:
        """Return the paired differences to the first method of the setting, in a column for each
        method that is one.
        """
        columns = {}
        for first, own in self.compared().groupby("first", sort=False):
            here = own.reindex(self.index)
            half = here["half_width"].where(here["pairs"] > 1)
            columns[f"vs {first}"] = numbers(here["difference"], f"+z.{self.digits}f", half)
        return columns

    def printed(self, name: str, heading: str = "{}") -> dict[str, Frame]:
        """Return the paper's numbers; `heading` has a place for their place."""
        columns = {}
        for each in self.paper.reported:
            own = [each.number(label, setting, name) for setting, label in self.index]
            quoted = pd.DataFrame(
                [number or UNPRINTED for number in own], self.index, Number._fields
            )
            columns[heading.format(each.place)] = numbers(quoted["mean"], text=quoted["printed"])
        return columns

    def mean(self, name: str, digits: int = 0) -> Frame:
        """Return the mean of a column of the finished runs."""
        values = pd.to_numeric(column(self.ended, name), errors="coerce").dropna()
        place = [self.ended.loc[values.index, key] for key in CELL]
        means = values.groupby(place, sort=False).agg(fmean).reindex(self.index)
        return numbers(means, f",.{digits}f")

    def chosen(self) -> Any:
        """Return the values that were chosen for the runs."""
        texts = pd.Series(_chosen(self.ended), self.ended.index, dtype=object)
        return (
            texts[texts != ""]
            .groupby([self.ended[key] for key in CELL])
            .first()
            .reindex(self.index)
        )

    def rates(self) -> Any:
        """Return the learning rates."""
        return pd.Series({key: _rate(own) for key, own in self.runs.groupby(CELL)}, self.index)

    def number(self) -> Any:
        """Return how many runs have come to their end."""
        ended = self.values["number"].groupby(level=CELL).max()
        return ended.reindex(self.index, fill_value=0)

    def caption(self) -> str:
        """Return what the numbers are."""
        counts = self.number()[lambda number: number > 0].unique()
        caption = f"{capitalized(self.heading(self.columns[0]))}: mean"
        if max(counts, default=1) > 1:
            if len(counts) == 1:
                caption += f" of {max(counts)} runs"
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
        settings = self.index.get_level_values("setting")
        labels = self.index.get_level_values("label")
        return table_of({"setting": settings, "method": labels, **columns}, self.index)


def _chosen(runs: Frame) -> list[str]:
    chosen = []
    for run in runs.to_dict("records"):
        chosen.append(chosen_of({key: value for key, value in run.items() if known(value)}))
    return chosen


def _rate(runs: Frame) -> float:
    """Return the learning rate of runs that differ by their seeds."""
    rate = next(iter(column(runs, "lr").dropna()), None) or options_of_runs(runs)[0].get("lr")
    return rate or nan


def results(runs: Frame, paper: Paper | None = None) -> Table:
    """Return the scores with their differences, and all other numbers, beside those of the
    paper.
    """
    lines = Lines(runs, paper)
    first, *others = lines.columns
    columns = {
        lines.heading(first): lines.scores(),
        **lines.differences(),
        **lines.printed(first),
    }
    for name in others:
        columns |= {
            lines.heading(name): lines.cells(name),
            **lines.printed(name, lines.heading(name) + " ({})"),
        }
    columns |= {"chosen": lines.chosen(), "runs": numbers(lines.number())}
    return Table("results", lines.caption(), lines.frame(columns), lines.footer())


def comparison(runs: Frame, caption: str) -> Table:
    """Return the scores of methods, their differences to the first one, and what they cost."""
    lines = Lines(runs, digits=1)
    chosen = lines.chosen()
    columns = {
        lines.heading(lines.columns[0]): lines.scores(),
        **lines.differences(),
        "personal": lines.cells(f"{lines.score}-personal", ""),
        "mean BN": lines.cells(f"{lines.score}-mean-bn", ""),
        "chosen": chosen,
        "lr": numbers(lines.rates().where(chosen.isna()), "g"),
        "MB sent": lines.mean("MB sent", 1),
        "exchanges": lines.mean("exchanges"),
        "s": lines.mean("seconds", 1),
    }
    return Table("results", caption, lines.frame(columns), lines.footer())


def reproduced(runs: Frame, paper: Paper, caption: str) -> Table:
    """Return the numbers beside those of the paper, one a line."""
    lines = Lines(runs, paper)
    parts = {}
    for name in lines.columns:
        columns = {"quantity": name, "chosen": lines.chosen(), "here": lines.cells(name)}
        parts[name] = lines.frame(columns | lines.printed(name))
    rows = []
    is_one_of_several = list[bool]()
    for setting, label in lines.index:
        quoted = paper.columns(label, setting)
        there = [
            name
            for name in lines.columns
            if name in quoted or (setting, name, label) in lines.values.index
        ]
        shown = there or lines.columns[:1]
        for name in shown:
            rows.append(parts[name].loc[[(setting, label)]])
            is_one_of_several.append(len(shown) > 1)
    frame = pd.concat(rows)
    frame["quantity", "text"] = frame["quantity", "text"].where(is_one_of_several, "")
    missing = frame["here", "number"].isna()
    frame.loc[missing, ("here", "text")] = lines.words().reindex(frame.index)[missing]
    return Table("results", caption, frame, lines.footer(has_differences=False))


def by_domain(runs: Frame, caption: str) -> Table:
    """Return the accuracy, or the error, of every domain, and their mean."""
    lines = Lines(runs, digits=1)
    columns = {name: lines.cells(name, "") for name in lines.domains}
    columns["mean"] = columns.pop(AVERAGE)
    return Table("results", caption, lines.frame(columns))


def unseen(runs: Frame, caption: str) -> Table:
    """Return the scores on domains that nobody trained with, each with half its 95 % interval."""
    lines = Lines(_by_unseen_domain(runs), digits=1)
    of_one_model = {
        heading_of(form).removesuffix(", %"): lines.cells(f"{lines.score}-{form}", "interval")
        for form in OF_ONE_MODEL
    }
    columns = {
        "as it is": lines.scores("interval"),
        **of_one_model,
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
            # the mean of runs of which one failed, or has no number, is no number
            has_ended = own["state"] == "finished"
            mean = {**own.loc[has_ended.idxmin()], "setting": "mean"}
            if has_ended.all():
                mean |= own.select_dtypes("float").apply(fmean)
            means.append(mean)
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
    digits = 2 if is_share(score) else ERROR_DIGITS
    done = [len(read_rounds(Path(folder))) for folder in runs["folder"]]
    rounds = [own.get("rounds") for own in options_of_runs(runs)]
    rates = [_rate(runs.loc[[run]]) for run in runs.index]
    columns = {
        "setting": runs["setting"],
        "method": runs["label"],
        "seed": numbers(runs["seed"]),
        "state": runs["state"].where(runs["error"] == "", "failed: " + runs["error"]),
        "rounds done": numbers(pd.Series(done, runs.index)),
        "of": numbers(pd.Series(rounds, runs.index)),
        "learning rate": numbers(pd.Series(rates, runs.index), "g"),
        "chosen": _chosen(ended),
        heading_of(score): numbers(scaled(ended, score), f",.{digits}f"),
        "exchanges": numbers(column(ended, "exchanges")),
        "MB sent": numbers(ended["MB sent"], ",.1f"),
        "seconds": numbers(column(ended, "seconds"), ",.1f"),
        "folder": [Path(folder).name for folder in runs["folder"]],
    }
    return Table("runs", "All runs", table_of(columns, runs.index))


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
        lines.append(f"Caution: nodes missing in rounds: {len(left)}; rounds.jsonl names them.")
    ways = of_clients(runs).groupby(column(runs, "trained-by"), sort=False)["label"].unique()
    if len(ways) > 1:
        each = "; ".join(f"{way} ({', '.join(labels)})" for way, labels in ways.items())
        lines.append(f"Seconds are of runs trained in different ways: {each}.")
    return lines
