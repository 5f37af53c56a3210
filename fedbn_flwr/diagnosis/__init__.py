"""Measure which mismatch of BN statistics hurts."""

from fedbn_flwr.diagnosis.measure import SHARED, Diagnosis, Measurement, check, diagnose, overall

__all__ = ["SHARED", "Diagnosis", "Measurement", "check", "diagnose", "overall"]
