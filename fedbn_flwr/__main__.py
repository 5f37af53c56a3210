"""`python -m fedbn_flwr` is the command `fedbn-flwr`."""

from fedbn_flwr.deployment.cli import main

# processes that a run starts import this module, too
if __name__ == "__main__":
    raise SystemExit(main())
