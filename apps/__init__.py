"""Thin Flower apps: the doors through which Flower's engines enter."""
