"""Recipes: matrices of runs in files, beside the numbers that a paper reports."""
