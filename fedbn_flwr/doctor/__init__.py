"""Is batch normalization right in a federation that exists?

`check` looks at state dicts, `watched` at the messages of a running Flower app, and the command
`fedbn-flwr doctor` at a whole app.
"""

from fedbn_flwr.doctor.check import check
from fedbn_flwr.doctor.findings import Finding
from fedbn_flwr.doctor.watched import watched

__all__ = ["Finding", "check", "watched"]
