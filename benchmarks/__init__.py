"""Seconds a round of each engine, beside a plain PyTorch loop: `make bench`. Not part of the
package.
"""
