"""Draws the pictures of docs/results.md from the tables in docs/measured: python
docs/draw_results.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from make_results import (
    DOCS,
    FACTORIAL,
    FIGURE_6,
    NAMES,
    PRETRAINED,
    SITUATIONS,
    Place,
    by_mean,
    read,
    runs,
)

from fedbn_flwr.experiments.results.plots import (
    Mark,
    draw_lines,
    draw_marks,
    figure,
    line_style,
    looks_of,
)
from fedbn_flwr.experiments.results.rows import pd
from fedbn_flwr.experiments.results.values import spread

#: methods of the pictures, by their label in the tables
SHOWN = ("FedAvg", "FedAvg+GN-WS", "FixBN", "FixBN+BN-WS", "FedWon", "FedTAN", "FedTAN carried")
SHOWN += ("FedTAN+BN-WS", "FedTAN carried+BN-WS")
LOOKS = looks_of(pd.DataFrame([{"label": NAMES[name], "method": NAMES[name]} for name in SHOWN]))
#: methods with a network that was already trained
TRAINED = (
    "Fed3R, BN frozen",
    "Fed3R",
    "BN frozen",
    "Head only",
    "FedTAN",
    "FixBN",
    "FedNCM",
    "FedAvg",
)
#: points by which names are moved that would stand on each other
APART = {"fedavg:freeze-bn=true": 5, "fedavg:trainable=head": -7}
#: running statistics fall behind the models of these methods until the rate drops
EXACT = {f"{name}, exact": f"{NAMES[name]}, exact" for name in ("FedTAN", "FedTAN carried")}
LONG = "two classes, 1,000 rounds"
PLACES = {
    "1 local step": "one local step, 400 rounds",
    "5 steps": "two classes",
    "20 steps": "twenty, 50 rounds",
    "10 of 100\nclients": "ten of 100 clients take part",
    "ResNet-20": "ResNet-20",
}
SIZE = (6.5, 3.8)


def draw_curves(panel: Any, setting: str, exact: str) -> None:
    """Draw the mean accuracy over the rounds of a setting.

    That with EXACT statistics is in the setting `exact`.
    """
    curves = read("curves").assign(label=lambda rows: rows["method"].map(NAMES | EXACT), run=0)
    curves["x"], curves["y"] = curves["round"].astype(int), curves["accuracy, %"].astype(float)
    better = curves[(curves["setting"] == exact) & curves["method"].isin(EXACT)]
    running = {*SHOWN} - {name.removesuffix(", exact") for name in better["method"]}
    points = pd.concat(
        [better, curves[(curves["setting"] == setting) & curves["method"].isin(running)]]
    )
    points = points.groupby(["label", "run", "x"], as_index=False)["y"].mean()
    draw_lines(
        panel, points, {found: LOOKS[name] for name in LOOKS for found in (name, f"{name}, exact")}
    )
    drops = [Mark("learning rate / 10", int(share * points["x"].max())) for share in (0.5, 0.75)]
    draw_marks(panel, dict.fromkeys(LOOKS, drops), LOOKS)
    panel.set(xlabel="round", ylabel="accuracy, %")
    panel.grid(alpha=0.3)


def draw_seeds(panel: Any, place: Place, methods: Sequence[str], x: str) -> None:
    """Draw the accuracy over the rounds or exchanges: the mean of seeds, and their range."""
    curves = read("curves")
    curves = curves[(curves["setting"] == ", ".join(place)) & curves["method"].isin(methods)]
    points = curves.assign(
        label=curves["method"].map(NAMES), run=curves["seed"], x=curves[x].astype(int)
    )
    points["y"] = points["accuracy, %"].astype(float)
    labels = [NAMES[name] for name in methods]
    draw_lines(panel, points, looks_of(pd.DataFrame({"label": labels, "method": labels})))
    panel.grid(alpha=0.3)


def draw_trained(panel: Any) -> None:
    """Draw the accuracy of a network that was already trained over the exchanges."""
    draw_seeds(panel, PRETRAINED["two classes"], TRAINED, "exchanges")
    for line in panel.lines:
        end = line.get_xydata()[-1]
        name = line.get_label()
        beside = (8, APART.get(name, 0))
        panel.annotate(
            name, end, beside, textcoords="offset points", va="center", color=line.get_color()
        )
    panel.set(
        xlabel="exchanges", ylabel="accuracy, %", xscale="log", xlim=(0.8, 15_000), ylim=(20, 90)
    )
    panel.xaxis.set_major_formatter("{x:,.0f}")


def draw_places(panel: Any, places: Mapping[str, Place]) -> None:
    """Draw the mean of each method's runs at each place, and the standard deviation over seeds."""
    for index, name in enumerate(SHOWN):
        made = [
            (at, runs()[*place, name])
            for at, place in enumerate(places.values())
            if (*place, name) in runs()
        ]
        x = [at + 0.8 * (index + 0.5) / len(SHOWN) - 0.4 for at, _ in made]
        means, deviations, _ = zip(*(spread([*scores]) for _, scores in made), strict=True)
        style = line_style(LOOKS[NAMES[name]]) | {"linestyle": "none", "elinewidth": 1.2}
        panel.errorbar(x, means, pd.Series(deviations).fillna(0), label=NAMES[name], **style)
    panel.set_xticks(range(len(places)), list(places))
    panel.set_xticks([at + 0.5 for at in range(len(places) - 1)], minor=True)
    panel.grid(axis="y", alpha=0.3)
    panel.grid(axis="x", which="minor", alpha=0.8)
    panel.tick_params(axis="x", which="both", length=0)
    panel.set(xlim=(-0.5, len(places) - 0.5), ylabel="accuracy, %")


if __name__ == "__main__":
    with figure(DOCS / "results-factorial.png", size=SIZE) as (picture, panel):
        draw_curves(panel, "factorial, two classes", "statistics, two classes")
        picture.add_legend(panel)
    with figure(DOCS / "results-labels.png", size=SIZE) as (picture, panel):
        draw_places(panel, FACTORIAL)
        picture.add_legend(panel)
    with figure(DOCS / "results-long.png", 2) as (picture, (early, late)):
        early.set(xlim=(0, 500), ylim=(10, 86))
        late.set(xlim=(490, 1010), ylim=(60, 86))
        draw_curves(early, LONG, LONG)
        draw_curves(late, LONG, LONG)
        picture.add_legend(early)
    with figure(DOCS / "results-pretrained.png", size=SIZE) as (picture, panel):
        draw_trained(panel)
    with figure(DOCS / "results-figure6.png", 2) as (picture, panels):
        methods = by_mean(FIGURE_6["two classes"])
        for panel, (labels, place) in zip(panels, FIGURE_6.items(), strict=True):
            draw_seeds(panel, place, methods, "round")
            panel.set(title=labels, xlabel="round", ylabel="accuracy, %", ylim=(0, 100))
        picture.add_legend(panels[0])
    with figure(DOCS / "results-settings.png", size=SIZE) as (picture, panel):
        draw_places(
            panel, {name: (FACTORIAL | SITUATIONS)[place] for name, place in PLACES.items()}
        )
        picture.add_legend(panel)
