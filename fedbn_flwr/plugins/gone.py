"""What a site can no longer ask for in its environment."""

from collections.abc import Mapping

from fedbn_flwr.plugins.options import UsageError

#: with which the variables begin by which a site asked for secure sums: in its kit, and for its ClientApps
_SUMS = ("FEDBN_SECURE", "FEDBN_FLWR_SECURE")


def refuse_sums(environment: Mapping[str, str]) -> None:
    """Raise UsageError where a site asks for secure sums: without them, its numbers would leave it in the clear."""
    for name, value in environment.items():
        if name.startswith(_SUMS) and value:
            raise UsageError(
                f"{name} is set, but secure sums are gone: the server would see this site's model, metrics and counts "
                "as they are, and in layer-wise steps its BN statistics and gradients; remove the variable to take "
                "part so (docs/methods.md, What leaves a node)"
            )
