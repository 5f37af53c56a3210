"""The embedded data: real digits, and the five domains made from them and from fonts."""

import numpy as np
import torch
from sklearn.datasets import load_digits

from fedbn_flwr.data import load
from fedbn_flwr.data.domains import DOMAINS, TEST_FONTS, TRAIN_FONTS, digits_domains, drawn, real_digits


def test_360_of_1797_digits_are_held_out_a_fifth_of_every_class() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 1, 8)
    everything = np.bincount(load_digits().target)
    for label, count in enumerate(torch.bincount(data.test.labels).tolist()):
        assert abs(count - everything[label] * 360 / 1797) < 1


def test_the_file_is_read_as_scikit_learn_reads_it() -> None:
    images, labels, _ = real_digits()
    expected, targets = load_digits(return_X_y=True)
    assert np.array_equal(images.reshape(-1, 64), (expected / 16).astype(np.float32))
    assert np.array_equal(labels, targets)


def test_five_domains_of_ten_classes() -> None:
    data = load("digits-domains")
    assert data.domain_names == DOMAINS == ("real", "fonts", "photos", "inverted", "sheared")
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 3, 28)
    for split, counts in ((data.train, [1437, 1440, 1437, 1437, 1437]), (data.test, [360] * 5)):
        assert split.inputs.dtype == torch.uint8
        assert split.domains is not None
        assert torch.bincount(split.domains).tolist() == counts
        assert (torch.bincount(split.domains * 10 + split.labels, minlength=50) >= 30).all()


def test_the_domains_are_deterministic() -> None:
    first, second = digits_domains(), digits_domains()
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert torch.equal(first.test.inputs, second.test.inputs)


def test_domains_of_real_digits_show_the_digits_of_their_split() -> None:
    _, labels, test = real_digits()
    data = load("digits-domains")
    for split, chosen in ((data.train, ~test), (data.test, test)):
        for domain in ("real", "photos", "inverted", "sheared"):
            assert torch.equal(split.labels[split.domains == DOMAINS.index(domain)], torch.from_numpy(labels[chosen]))
        inverted = split.inputs[split.domains == DOMAINS.index("inverted")].float().mean(1).flatten(1)
        real = split.inputs[split.domains == DOMAINS.index("real")].float().mean(1).flatten(1)
        # of all inverted images, that of the very same digit resembles it least
        correlation = torch.corrcoef(torch.cat([real[:100], inverted[:100]]))[:100, 100:]
        assert torch.equal(correlation.argmin(1), torch.arange(100))


def test_fonts_draw_every_digit_as_often_and_with_ink() -> None:
    assert not set(TRAIN_FONTS) & set(TEST_FONTS)
    images, labels = drawn(("cmr10", "DejaVuSans"), torch.Generator().manual_seed(0))
    assert torch.bincount(labels).tolist() == [18] * 10
    assert images.shape == (180, 3, 28, 28)
    assert (images.flatten(1).std(1) > 0.05).all()
