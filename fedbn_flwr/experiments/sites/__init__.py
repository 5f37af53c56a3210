"""Runs on data that sites have: what each site says of them, and what all agree on before round
1.
"""
