"""Momentum that is not thrown away at the end of a round."""

from typing import ClassVar

from torch import Tensor

from fedbn_flwr import wire
from fedbn_flwr.client.rules import Rule, Session, register_rule
from fedbn_flwr.state.flat import to_device


@register_rule
class MaintainedMomentum(Rule):
    """The optimizer's state goes on from round to round.

    Zhong, Chen, Chao, Making Batch Normalization Great in Federated Deep Learning, section 7.
    `local`: each node keeps its own. `global`: nodes send it with the weights, the server averages
    it likewise and sends it back, which doubles the messages; the state of parameters that stay on
    the client stays there too.
    """

    #: `local`, `global`, or `none`, which is off
    momentum_state: str = "none"
    needs_optimizer: ClassVar[bool] = True
    needs_all: ClassVar[bool] = True

    def begin(self, session: Session) -> None:
        """Put the state back into the optimizer."""
        known = session.memory.recall(wire.MOMENTUM)
        if self.momentum_state == "global":
            known = {**known, **session.received.get(wire.MOMENTUM, {})}
        learned = session.learned()
        self._begun = {entry.rpartition("/")[0] for entry in known}
        given = session.optimizer.defaults
        # optimizers count their steps on the CPU, or in every step they would wait for a GPU to
        # tell the number
        moved = known
        if not (given.get("fused") or given.get("capturable")):
            moved = {
                entry: value for entry, value in known.items() if entry.split("/")[-1] != "step"
            }
        moved = to_device(moved, learned)
        for entry, value in {**known, **moved}.items():
            name, _, kind = entry.rpartition("/")
            if name in learned:
                state = session.optimizer.state[learned[name]]
                # the optimizer changes it in place, and it may be somebody else's too
                if kind in state:
                    state[kind].copy_(value)
                else:
                    state[kind] = value.clone()

    def finish(self, session: Session) -> None:
        """Send or store the state."""
        learned = session.learned()
        if session.steady:
            # it has state of parameters that take part in no step, too, which nobody else has
            learned = {
                name: parameter
                for name, parameter in learned.items()
                if parameter.grad is not None or name in self._begun
            }
        # as `parameter name/kind`; plain SGD has none
        state = {
            f"{name}/{kind}": value.detach().clone()
            for name, parameter in learned.items()
            for kind, value in session.optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }
        if self.momentum_state == "local":
            session.memory.store(wire.MOMENTUM, state)
            return
        stays = {
            entry: value
            for entry, value in state.items()
            if entry.rpartition("/")[0] in session.stays
        }
        if stays:
            session.memory.store(wire.MOMENTUM, stays)
        session.records[wire.MOMENTUM] = {
            entry: value for entry, value in state.items() if entry not in stays
        }
