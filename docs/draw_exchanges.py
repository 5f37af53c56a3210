"""Draws the picture of exchanges in docs/benchmarks.md from docs/measured/exchanges.csv.

python docs/draw_exchanges.py

The table is written by `python -m benchmarks.exchanges`.
"""

from make_results import DOCS, read

from fedbn_flwr.experiments.results.plots import SIZE, figure, line_style

if __name__ == "__main__":
    table = read("exchanges").drop(columns="model").astype(float)
    with figure(DOCS / "exchanges.png", size=SIZE) as (picture, panel):
        for look, (delay, rows) in enumerate(table.groupby("delay, ms")):
            quartiles = rows[["lower quartile", "seconds", "upper quartile"]]
            low, middle, high = (1000 * quartiles.div(rows["exchanges"], axis=0)).to_numpy().T
            style = line_style(look)
            panel.plot(rows["workers"], middle, label=f"delay {delay:g} ms", **style)
            panel.fill_between(
                rows["workers"], low, high, alpha=0.2, color=style["color"], linewidth=0
            )
        panel.set(
            xlabel="workers",
            ylabel="ms per exchange",
            xticks=table["workers"].unique(),
            ylim=(0, None),
        )
        panel.grid(alpha=0.3)
        picture.add_legend(panel)
