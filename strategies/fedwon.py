"""FedWon."""

from collections.abc import Mapping
from math import inf
from typing import Annotated, Any, ClassVar, Literal

from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.replies import CannotTrainError
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg
from .registry import register_strategy

#: the batch size from which the paper's ablation finds clipping to help
CLIPPING_BATCH_SIZE = 32


@register_strategy("fedwon")
class FedWon(FedAvg):
    """No normalizer at all: convolutions with scaled weight standardization, and adaptive gradient
    clipping.

    Zhuang, Lyu, FedWon: Triumphing Multi-domain Federated Learning Without Normalization, ICLR
    2024. Numbers that are compared with are those of the preprint, arXiv:2306.05879.

        W'_ij = gain (W_ij - mu_i) / (sigma_i sqrt(N))
        G_i <- lambda G_i ||W_i|| / ||G_i||   where ||G_i|| / ||W_i|| > lambda

    The model must be built with `norm="wsconv"`, which an experiment does by itself. `agc="auto"`
    clips from batch size 32 on, as in the paper's ablation; `wsconv=False` is the ablation without
    standardization. `gain` is `constant` or `learnable`. With `agc="off"` and the model as it is,
    this is FedAvg.

    Deviations, of which the paper says nothing: convolutions start with rows of unit norm; gamma is
    that of the activation before a convolution, and the one of ReLU at the images; convolutions
    that lost a normalizer have a bias. `branch_scale` is the gain of the last convolution of every
    residual branch. The paper does not mention one, and its text is `branch_scale="paper"`, the
    same as 1. By default it is `auto`, sqrt(2 / number of branches), without which the variance
    doubles at every block; Brock et al. take 0.2. Models without branches are the same.
    """

    paper: ClassVar[str] = "Zhuang and Lyu, ICLR 2024"
    needs: str = "no-bn"
    evaluated_with: ClassVar[tuple[str, ...]] = ("running",)

    def __init__(
        self,
        *,
        agc: Annotated[
            Literal["on", "off", "auto"],
            "clip gradients: on, off, or auto, which is on from batch size 32",
        ] = "auto",
        clip_factor: Annotated[
            float,
            "largest ratio of a unit's gradient to its weights, to which clients clip it",
            Range(0, excluded="low"),
        ] = 0.1,
        wsconv: Annotated[bool, "standardize convolutions; false is the ablation without"] = True,
        gain: Annotated[
            Literal["constant", "learnable"],
            "gain of standardized convolutions: constant or learnable",
        ] = "constant",
        branch_scale: Annotated[
            float | Literal["auto", "paper"],
            "gain at the end of residual branches: auto, paper (which is 1) or a number",
        ] = "auto",
        **options: Any,
    ) -> None:
        super().__init__(clip_factor=clip_factor, **options)
        if not wsconv and (gain, branch_scale) != ("constant", "auto"):
            raise ValueError(
                "gain and branch_scale are of standardized convolutions, which wsconv=false "
                "leaves out"
            )
        self.agc = agc
        self.clips_from = {"on": 0, "auto": CLIPPING_BATCH_SIZE, "off": inf}[agc]
        self.wsconv = wsconv
        self.gain = gain
        self.branch_scale = branch_scale

    @classmethod
    def own_norm(cls, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Standardized convolutions in place of normalizers."""
        if not options.get("wsconv", True):
            return "none", {}
        return "wsconv", {
            name: options[name] for name in ("gain", "branch_scale") if name in options
        }

    def instruct(self, instruction: Instruction) -> Instruction:
        """Refuse a model with BN, also for clients that cannot tell."""
        statistics = [name for name in self.round.current if name.endswith("running_var")]
        if statistics:
            made = (
                "make it with `prepare(model, FedWon)` of fedbn_flwr.strategies, on the server "
                "and on the nodes"
            )
            raise CannotTrainError(
                f"FedWon is for models without BN, and there is {statistics[0]!r}: {made}"
            )
        return super().instruct(instruction)
