"""A SuperNode that comes back is noticed, whatever the server answers."""

from contextlib import nullcontext
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse

from fedbn_flwr.deployment import flower_internals, health
from fedbn_flwr.deployment.flower_internals import (
    CONNECTED,
    OFFLINE,
    PAUSE,
    REFUSED,
    come_back_noticed,
)


class AnsweredError(RuntimeError):
    """What a server answers instead of a node's number."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(str(status))
        self.response = SimpleNamespace(status_code=status.value)


REFUSES, BREAKS = (
    AnsweredError(HTTPStatus.PRECONDITION_FAILED),
    AnsweredError(HTTPStatus.BAD_GATEWAY),
)
REQUEST = ActivateNodeRequest(public_key=b"key", heartbeat_interval=30)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was done, in a time of its own."""
    events: list[object] = []

    def sleep(seconds: float) -> None:
        events.append(seconds)

    def now() -> float:
        return sum(event for event in events if isinstance(event, float))

    monkeypatch.setattr(flower_internals, "time", SimpleNamespace(sleep=sleep, monotonic=now))
    return events


def client(answers: list[Exception | None], done: list[object], registered: bool = True) -> Any:
    """A client of Flower's kind.

    The server gives these answers, and then the last one again and again.
    """

    def activate(self: object, request: ActivateNodeRequest) -> ActivateNodeResponse:
        if registered and not request.heartbeat_interval:
            assert request.public_key == REQUEST.public_key
            raise AnsweredError(HTTPStatus.BAD_REQUEST)
        if not request.heartbeat_interval:
            raise REFUSES
        done.append("activate")
        if answer := answers.pop(0) if len(answers) > 1 else answers[0]:
            raise answer
        return ActivateNodeResponse(node_id=7)

    kind = type("Client", (), {"ActivateNode": activate})
    come_back_noticed(kind)
    return kind()


@pytest.mark.parametrize(
    ("answers", "registered", "wanted"),
    [
        # a first start
        ([None], True, ["activate"]),
        # the node before has been offline for some looks of a run
        ([REFUSES, None], True, ["activate", CONNECTED + OFFLINE, "activate"]),
        # a key that is registered only now
        ([REFUSES, REFUSES, None], False, ["activate", PAUSE, "activate", PAUSE, "activate"]),
        # other errors are Flower's to handle
        ([BREAKS], True, ["activate"]),
        ([REFUSES, BREAKS], True, ["activate", CONNECTED + OFFLINE, "activate"]),
    ],
)
def test_a_node_goes_on_as_soon_as_it_may(
    answers: list[Exception | None],
    registered: bool,
    wanted: list[object],
    done: list[object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(AnsweredError, match="502") if BREAKS in answers else nullcontext():
        assert client(answers, done, registered).ActivateNode(REQUEST).node_id == 7
    assert done == wanted
    assert OFFLINE > 3 * 3  # a ServerApp looks for replies every three seconds
    assert ("Failed to activate SuperNode" in capsys.readouterr().err) == (len(wanted) > 1)


@pytest.mark.parametrize(
    ("registered", "reason"),
    [
        (True, "the SuperNode before it still counts as connected"),
        (
            False,
            "the server does not know its key: it is not registered, or it was and has been "
            "revoked",
        ),
    ],
)
def test_a_refusal_says_which_of_its_reasons_it_has(
    registered: bool, reason: str, done: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    client([REFUSES, REFUSES, None], done, registered).ActivateNode(REQUEST)
    assert capsys.readouterr().err == (
        f"Failed to activate SuperNode: {reason}; trying again for {REFUSED:.0f} seconds\n"
    )


def test_a_key_that_nobody_registered_is_refused_in_the_end(done: list[object]) -> None:
    with pytest.raises(AnsweredError, match="412"):
        client([REFUSES], done, registered=False).ActivateNode(REQUEST)
    # as long as a dead node counts as connected
    assert REFUSED >= 60
    assert sum(event for event in done if isinstance(event, float)) == pytest.approx(
        REFUSED, abs=PAUSE
    )


def test_a_node_that_is_connected_and_refused_is_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(
        flower_internals,
        "time",
        SimpleNamespace(sleep=lambda _: codes.append(health.main()), monotonic=lambda: 0.0),
    )
    monkeypatch.setattr(health, "connected", lambda *_: True)
    monkeypatch.setenv("FEDBN_HEALTH", f"accepted 8443 {tmp_path / 'accepted'}")
    (tmp_path / "accepted").touch()  # by the node before
    client([REFUSES, None], []).ActivateNode(REQUEST)
    assert codes == [1]
    assert health.main() == 0
