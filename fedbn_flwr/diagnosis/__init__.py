"""The distance of BN on each client's mini-batch from BN on all clients' together."""

from fedbn_flwr.diagnosis.measure import Diagnosis, Measurement, check, diagnose, overall

__all__ = ["Diagnosis", "Measurement", "check", "diagnose", "overall"]
