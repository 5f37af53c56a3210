"""The digits that scikit-learn ships: 1,797 real handwritten digits of 8x8 pixels, without a download."""

import numpy as np
import torch
from numpy.typing import NDArray

from fedbn_flwr.data.splits import Data, Split, stratified
from fedbn_flwr.randomness import numpy_generator

#: how many of the 1,797 are the test set
HELD_OUT = 360


def digits() -> Data:
    """`sklearn.datasets.load_digits`, 360 of 1,797 held out: always the same ones, a fifth of every class."""
    images, labels, test = real_digits()
    inputs = torch.from_numpy(images).unsqueeze(1)
    everything = Split(inputs, torch.from_numpy(labels))
    return Data("digits", everything.select(np.flatnonzero(~test)), everything.select(np.flatnonzero(test)), 10)


def real_digits() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """The images (N x 8 x 8, from 0 to 1), their labels, and which of them are held out for testing."""
    from sklearn.datasets import load_digits  # takes over a second to import: only who needs it pays

    images, labels = load_digits(return_X_y=True)
    labels = labels.astype(np.int64)
    test = np.zeros(len(labels), dtype=np.bool_)
    test[stratified(labels, HELD_OUT, numpy_generator(0, "digits", "test"))] = True
    return (images / 16).astype(np.float32).reshape(-1, 8, 8), labels, test
