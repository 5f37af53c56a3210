"""Sites that come after round 1: asked, numbered, and hidden from the strategy if their data do not
fit.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from fedbn_flwr.experiments import Config, UsageError
from fedbn_flwr.experiments.client_side import use_agreed
from fedbn_flwr.experiments.sites.agreement import SitesGrid, agree, spoken
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.wire import CONFIG
from fedbn_flwr.wire.site_data import SITE_DATA, SiteData, problem

NORTH = SiteData(
    site=0,
    task="classification",
    class_names=("ill", "well"),
    samples=(4, 2),
    train=(3, 1),
    test=(1, 1),
    shape=(1, 8, 8),
    scaled=True,
    mean=(0.25,),
    variance=(0.01,),
)
SOUTH = replace(NORTH, site=1, samples=(12, 2), train=(8, 4), mean=(0.75,), variance=(0.09,))
CONFIG_OF_RUN = Config().but(dataset="sites", classes=("ill", "well"))


class Answering(InProcessGrid):
    """Nodes that answer with a description, or the reason why there is none; only some are
    connected.
    """

    def __init__(self, *sites: SiteData | str) -> None:
        self.sites, self.connected = list(sites), set[int]()
        self.asked: list[int] = []
        super().__init__(lambda message, context: self._describe(message, context), len(sites))  # type: ignore[arg-type]

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.connected)

    def _describe(self, message: Message, context: Context) -> Message:
        assert message.metadata.message_type == SITE_DATA
        self.asked.append(context.node_id)
        site = self.sites[context.node_id - 1000]
        return Message(problem(site) if isinstance(site, str) else site.pack(), reply_to=message)


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    "key", ["train-counts", "test-counts", "image-shape", "pixel-mean", "pixel-variance"]
)
@pytest.mark.parametrize("value", [[-1], [float("nan")], ["x"], 5, [], [1e300]])
def test_a_description_that_is_none_is_an_error_in_one_line(key: str, value: Any) -> None:
    content = NORTH.pack()
    content.metric_records["metrics"].__dict__["_data"][key] = value
    with pytest.raises(ValueError, match="its app does not say what its data are"):
        SiteData.read(content)


OF_ANOTHER_TYPE: list[dict[str, Any]] = [
    {"site": 0.0},
    {"train": (3.0, 1.0)},
    {"test": (1.0, 1.0)},
    {"shape": (1.0, 8.0, 8.0)},
    {"class_names": (b"", b"well")},
]


def test_one_mean_a_channel_and_counts_of_all_classes_or_none() -> None:
    for wrong in (
        replace(NORTH, site=-1),
        replace(NORTH, train=(2**53 + 2, 1)),
        replace(NORTH, mean=(1.5,)),
        replace(NORTH, samples=(2**53 + 2, 2)),
        replace(NORTH, test=()),
        replace(NORTH, task="class\n"),
        replace(NORTH, scaled=2),  # type: ignore[arg-type]  # what is tested
        replace(NORTH, variance=(-0.01,)),
        replace(NORTH, mean=(0.5, 0.5)),
        replace(NORTH, mean=(0.5, 0.5), variance=(0.1, 0.1)),
        replace(NORTH, shape=(1,) * 5),
        replace(NORTH, shape=(), mean=(), variance=()),
        *(replace(NORTH, **each) for each in OF_ANOTHER_TYPE),
        # names of classes
        *(
            replace(NORTH, class_names=(name, "well"))
            for name in ("well", "ill\x1b[2J", "i\nll", "\x85", "i" * 501)
        ),
    ):
        with pytest.raises(ValueError, match="its app does not say what its data are"):
            SiteData.read(wrong.pack())
    for right in (
        replace(NORTH, train=(2**53, 1)),
        replace(NORTH, shape=(1,), scaled=False, mean=(37.0,), variance=(9.0,)),
        replace(NORTH, scaled=False, mean=(-600.0,), variance=(250000.0,)),
        replace(NORTH, task="segmentation", train=(), test=()),
        replace(NORTH, shape=(20,), mean=(), variance=()),
        # a no-break space, and joiners in Persian and in an emoji
        replace(
            NORTH,
            class_names=(
                "not\xa0ill",
                "\u0645\u06cc\u200c\u0634\u0648\u062f \U0001f469\u200d\u2695",
            ),
        ),
    ):
        assert SiteData.read(right.pack()) == right


def test_texts_of_a_site_are_shown_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^no\S* {2}\[2Jx{400,}$") as error:
        SiteData.read(problem(f"no\n\x1b[2J{'x' * 10**6}"))
    assert len(str(error.value)) == 500
    many = replace(
        NORTH, class_names=("a\u2028", *map(str, range(999))), train=(1,) * 1000, test=(1,) * 1000
    )
    unlike = agree(CONFIG_OF_RUN, {1: NORTH}).objection(
        2, replace(many, site=1, class_names=("\u2028" * 500,)), {}
    )
    for line in (spoken(many), unlike):
        assert (len(line), line.isprintable()) == (500, True)
    with pytest.raises(UsageError) as unknown:
        agree(Config().but(dataset="sites"), {1: replace(NORTH, class_names=("a", "b" * 10**6))})
    assert len(str(unknown.value)) < 600


#: a third site that cannot take part although it is asked first, and why
UNFIT: dict[str, tuple[SiteData | str, str]] = {
    "problem": ("the folder is empty", "the folder is empty"),
    "class": (
        replace(NORTH, site=2, class_names=("dead", "well")),
        "class 'dead' is not one of the run's classes: ill, well",
    ),
    "shape": (
        replace(NORTH, site=2, shape=(1, 9, 9)),
        "its images are 1x9x9, but 1x8x8 at most sites (set image-size to scale all images)",
    ),
    "means": (replace(NORTH, site=2, mean=(), variance=()), "it says 0 means, but most sites 1"),
    "task": (
        replace(NORTH, site=2, task="segmentation", train=(), test=()),
        "its data are for segmentation, but those of most sites for classification",
    ),
    "pixels": (
        replace(NORTH, site=2, scaled=False, mean=(127.5,)),
        "its channels have means and variances up to 127.5, but inputs at most sites are from 0 "
        "to 1",
    ),
    "signs": (
        replace(NORTH, site=2, scaled=False, mean=(-0.5,)),
        "its channels have means and variances up to 0.5, but inputs at most sites are from 0 to 1",
    ),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_site_that_does_not_fit_is_left_out_if_enough_others_do(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    unfit, reason = UNFIT[kind]
    agreement = agree(CONFIG_OF_RUN.but(min_nodes=2), {3: unfit, 1: NORTH, 2: SOUTH})
    assert agreement == agree(CONFIG_OF_RUN.but(min_nodes=2), {1: NORTH, 2: SOUTH})
    assert warnings(caplog) == [f"Node 3 is not there at the start: {reason}"]
    for fewest in (0, 3):
        with pytest.raises(UsageError, match="node 3: ") as error:
            agree(CONFIG_OF_RUN.but(min_nodes=fewest), {3: unfit, 1: NORTH, 2: SOUTH})
        assert str(error.value) == f"node 3: {reason}"


def test_of_two_sites_the_one_with_inputs_from_0_to_1_counts() -> None:
    other = replace(SOUTH, scaled=False, mean=(1e30,))
    with pytest.raises(UsageError, match="node 2: its channels have means and variances up to"):
        agree(CONFIG_OF_RUN, {1: NORTH, 2: other})
    # where none is, any are
    alone = replace(NORTH, scaled=False, mean=(-0.5,))
    assert agree(CONFIG_OF_RUN, {1: alone, 2: other}).config.data.mean == pytest.approx((7.5e29,))


def test_a_site_that_outweighs_the_others_normalization_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agree(CONFIG_OF_RUN, {1: NORTH, 2: SOUTH, 3: replace(NORTH, site=2, samples=(10**12, 0))})
    assert warnings(caplog) == [
        "Node 3 outweighs the others in the sites' descriptions: it counts 1e+12, and ten times "
        "the median is 120"
    ]


def test_normalization_is_that_of_all_images_together() -> None:
    # 4 images of mean 1/4 and variance 1/100, 12 of mean 3/4 and variance 9/100
    config = agree(CONFIG_OF_RUN, {1: NORTH, 2: SOUTH}).config
    mean = (4 * 0.25 + 12 * 0.75) / 16
    assert config.data.mean == (mean,)
    spread = 4 * (0.01 + (0.25 - mean) ** 2) + 12 * (0.09 + (0.75 - mean) ** 2)
    assert config.data.std[0] == pytest.approx((spread / 16) ** 0.5, rel=1e-15)
    # every site has a number of its own
    with pytest.raises(
        UsageError, match="node 2: node 1 has its site number 0: give each site its own number"
    ):
        agree(CONFIG_OF_RUN, {1: NORTH, 2: replace(SOUTH, site=0)})
    fewer = CONFIG_OF_RUN.but(min_nodes=1)
    assert agree(fewer, {1: NORTH, 2: replace(SOUTH, site=0)}).sites == {1: NORTH}
    # a channel without any spread is not divided by 0
    assert agree(CONFIG_OF_RUN, {1: replace(NORTH, variance=(0.0,))}).config.data.std == (1.0,)


def test_later_sites_are_asked_once_and_shown_if_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Answering(
        NORTH, SOUTH, replace(SOUTH, site=2, class_names=("dead", "well")), replace(NORTH, site=1)
    )
    grid = SitesGrid(nodes, agree(CONFIG_OF_RUN, {1000: NORTH}))
    nodes.connected = {1000}
    assert list(grid.get_node_ids()) == [1000]
    nodes.connected = {1000, 1001, 1002}
    assert [list(grid.get_node_ids()) for _ in range(2)] == [[1000, 1001]] * 2
    assert nodes.asked == [1001, 1002]
    # the number of a site that is there, and of one that has gone
    nodes.connected = {1000, 1001, 1003}
    assert list(grid.get_node_ids()) == [1000, 1001]
    nodes.connected = {1000}
    assert list(grid.get_node_ids()) == [1000]
    nodes.connected = {1000, 1003}
    assert list(grid.get_node_ids()) == [1000, 1003]
    assert warnings(caplog) == [
        "Node 1002 cannot take part until its SuperNode starts again: "
        "class 'dead' is not one of the run's classes: ill, well",
        "Node 1003 cannot take part until its SuperNode starts again: "
        "node 1001 has its site number 1: give each site its own number",
    ]


def test_a_refused_site_is_asked_again_when_it_comes_back() -> None:
    nodes = Answering(NORTH, "the folder is empty")
    grid = SitesGrid(nodes, agree(CONFIG_OF_RUN, {1000: NORTH}))
    nodes.connected = {1000, 1001}
    assert list(grid.get_node_ids()) == [1000]
    nodes.sites[1] = SOUTH
    assert list(grid.get_node_ids()) == [1000]
    nodes.connected = {1000}
    assert list(grid.get_node_ids()) == [1000]
    nodes.connected = {1000, 1001}
    assert list(grid.get_node_ids()) == [1000, 1001]


def test_the_normalization_of_a_message_is_an_option_for_its_client_only() -> None:
    context = Context(1, 1, {}, RecordDict(), {"mean": "", "std": "", "seed": 7})
    agreement = agree(CONFIG_OF_RUN, {1: NORTH})
    seen = []

    def client(message: Message, context: Context) -> Message:
        seen.append(dict(context.run_config))
        raise OSError("the disk is full")

    message = Message(RecordDict({CONFIG: agreement.to_config()}), 1, "train")
    with pytest.raises(OSError, match="the disk is full"):
        use_agreed(message, context, client)
    assert seen == [{"mean": "0.25", "std": repr(0.01**0.5), "seed": 7}]
    assert context.run_config == {"mean": "", "std": "", "seed": 7}
