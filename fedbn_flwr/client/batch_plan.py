"""The samples of each local step, drawn from a generator before training starts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbn_flwr.data import Split, parse_augmentation
from fedbn_flwr.data.augmentation import Crop, Edits, ImageAugmentation
from fedbn_flwr.data.splits import Batch
from fedbn_flwr.wire import Instruction


def draw_batches(
    count: int, sizes: Sequence[int], replacement: bool, generator: torch.Generator
) -> Tensor:
    """Draw mini-batches of these sizes for a client with `count` samples: their positions, one
    after another.
    """
    if replacement:
        return torch.cat([torch.randint(count, (size,), generator=generator) for size in sizes])
    epochs = -(-sum(sizes) // count)
    return torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])[
        : sum(sizes)
    ]


def batch_sizes(count: int, instruction: Instruction, merge_single: bool) -> list[int]:
    """Return the sizes of the mini-batches of one round for a client with `count` samples.

    A last short batch is kept. With `merge_single`, for models whose BN cannot take one sample, a
    last batch of one is merged into the one before.
    """
    if count < 1:
        raise ValueError("a client needs at least one sample to train")
    if instruction.batch_size < 1 or max(instruction.local_steps, instruction.local_epochs) < 1:
        raise ValueError("batch-size, and one of local-steps and local-epochs, must be at least 1")
    epoch = pass_sizes(count, instruction.batch_size, merge_single and not instruction.replacement)
    if instruction.replacement:
        epoch = [instruction.batch_size] * len(epoch)
    steps = instruction.local_steps or instruction.local_epochs * len(epoch)
    return (epoch * -(-steps // len(epoch)))[:steps]


def leaves_one(count: int, size: int) -> bool:
    """Whether a last batch of a single sample is left over."""
    return 1 < size < count and count % size == 1


def pass_sizes(count: int, size: int, merge_single: bool) -> list[int]:
    """Return batch sizes of one pass over `count` samples.

    `merge_single` puts a last one into the batch before.
    """
    if merge_single and leaves_one(count, size):
        return [size] * (count // size - 1) + [size + 1]
    rest = count % size
    if rest:
        return [size] * (count // size) + [rest]
    return [size] * (count // size)


@dataclass(frozen=True)
class BatchLoader:
    """Loads a client's mini-batches of one round.

    Every pass over them goes on drawing augmentations.
    """

    split: Split
    device: torch.device
    augmentation: str
    #: indices into `split`, of all mini-batches one after another
    samples: Tensor
    #: the number of samples in each mini-batch
    sizes: list[int]
    generator: torch.Generator

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Batch]:
        """Load and augment one mini-batch after another."""
        for inputs, targets in self.edited():
            yield self.augmented(inputs), targets

    def edited(self) -> Iterator[Batch]:
        """Load one mini-batch after another, with only those augmentations that change single
        images.
        """
        return self.split.batches(self.samples, self.sizes, self.device, self.edits())

    def edits(self) -> Edits | None:
        """Draw a seed for each sample, if the augmentation changes single images before they are in
        a batch.
        """
        augmentation = parse_augmentation(self.augmentation)
        if not isinstance(augmentation, ImageAugmentation):
            return None
        # batch by batch: the first batch has the same seeds by itself as with the others
        seeds = [torch.randint(2**62, (size,), generator=self.generator) for size in self.sizes]
        return Edits(augmentation, torch.cat(seeds))

    def augmented(self, inputs: Tensor) -> Tensor:
        """Augment one mini-batch, unless its images were changed one by one."""
        return augment_together([self], inputs.unsqueeze(0))[0]


def augment_together(loaders: Sequence[BatchLoader], inputs: Tensor) -> Tensor:
    """Augment a mini-batch of each of several clients (clients x batch x C x H x W), where it is
    done by the batch.
    """
    split = loaders[0].split
    augmentation = parse_augmentation(loaders[0].augmentation)
    if not isinstance(augmentation, Crop):
        return inputs
    if any(loader.split is not split for loader in loaders):
        each = zip(loaders, inputs.split(1), strict=True)
        return torch.cat([augment_together([loader], images) for loader, images in each])
    count = inputs.shape[1]
    size = inputs.shape[-2:]
    # what is drawn goes to a GPU in one copy
    drawn = torch.cat([augmentation.draw(count, size, loader.generator) for loader in loaders])
    return augmentation.cut(inputs.flatten(0, 1), drawn, split.mean, split.std).view_as(inputs)


def load_groups(
    loaders: Sequence[BatchLoader], groups: Sequence[tuple[Sequence[int], int]]
) -> Iterator[Batch]:
    """Load mini-batches of several clients, those of a group as one batch.

    A group is the positions of some loaders, and the number of the mini-batch that each of them
    loads. Groups have the mini-batches of a loader in their order. Batches are `edited`, but not
    `augmented`.
    """
    first = loaders[0]
    if any(loader.split is not first.split for loader in loaders):
        return _joined([loader.edited() for loader in loaders], [rows for rows, _ in groups])
    members = [(row, step) for rows, step in groups for row in rows]
    sizes = []
    for rows, step in groups:
        sizes.append(sum(loaders[row].sizes[step] for row in rows))
    chosen = [loader.samples.split(loader.sizes) for loader in loaders]
    samples = torch.cat([chosen[row][step] for row, step in members])
    edits = [loader.edits() for loader in loaders]
    if edits[0] is None:
        return first.split.batches(samples, sizes, first.device)
    seeds = [
        own.seeds.split(loader.sizes) for own, loader in zip(edits, loaders, strict=True) if own
    ]
    joined = Edits(edits[0].augmentation, torch.cat([seeds[row][step] for row, step in members]))
    return first.split.batches(samples, sizes, first.device, joined)


def _joined(loaded: Sequence[Iterator[Batch]], groups: Iterable[Sequence[int]]) -> Iterator[Batch]:
    """Join the next mini-batch of each client of a group."""
    for rows in groups:
        inputs, targets = zip(*(next(loaded[row]) for row in rows), strict=True)
        yield torch.cat(inputs), torch.cat(targets)
