"""Optimizers whose steps captured ones may take: rates are tensors, and with the rest of what the
optimizer works with they lie where those of the round before did.
"""

import torch
from torch import Tensor

from fedbn_flwr.client.rules import Session
from fedbn_flwr.client.training import SGD
from fedbn_flwr.device import has_graphs


class SteadySGD(SGD):
    """SGD whose rates are tensors, and whose momentum begins with zeros.

    torch's own waits for the device to tell such a rate.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody has a closure
        """Move the parameters that have a gradient."""
        for group in self.param_groups:
            moved = [value for value in group["params"] if value.grad is not None]
            if not moved:
                continue
            ways: list[Tensor] | tuple[Tensor, ...] = [value.grad for value in moved]
            if group["weight_decay"]:
                ways = torch._foreach_add(ways, moved, alpha=group["weight_decay"])
            if group["momentum"]:
                kept = [self.state[value]["momentum_buffer"] for value in moved]
                torch._foreach_mul_(kept, group["momentum"])
                torch._foreach_add_(kept, ways)
                ways = kept
            torch._foreach_sub_(moved, torch._foreach_mul(ways, group["lr"]))


def steady(session: Session) -> None:
    """Let the session keep what its optimizer, one of `make_optimizer`, works with, where its model
    is on an accelerator that can replay its steps.
    """
    groups = session.optimizer.param_groups
    if not has_graphs(groups[0]["params"][0].device):
        return
    if isinstance(session.optimizer, SGD):
        session.optimizer = SteadySGD(groups, lr=0.0)
    for number, group in enumerate(session.optimizer.param_groups):
        learned = group["params"]
        # of rates, and of the number of steps, of which Adam takes powers
        exact = torch.promote_types(learned[0].dtype, torch.float32)
        number_like = learned[0].new_empty((), dtype=exact)
        [rate] = session.keep(f"rate {number}", [number_like])
        group["lr"] = rate.fill_(group["lr"])
        state = {}
        if "betas" in group:  # Adam, AdamW
            group["capturable"] = True
            state = {
                "step": [number_like] * len(learned),
                "exp_avg": learned,
                "exp_avg_sq": learned,
            }
        elif group["momentum"]:
            state = {"momentum_buffer": learned}
        for kind, like in state.items():
            kept = session.keep(f"{kind} {number}", like)
            torch._foreach_zero_(kept)
            for parameter, value in zip(learned, kept, strict=True):
                session.optimizer.state[parameter][kind] = value
    session.steady = True
