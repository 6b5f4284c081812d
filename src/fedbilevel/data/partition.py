"""How samples are partitioned among clients.

A partition is one array of sample indices per client: disjoint, exhaustive and shuffled.

Published experiments with 100 clients on MNIST's 60,000 training samples use these splits: FedNest
(Tarzanagh et al. 2022) `iid` with `split(validation=0.5)`, 300/300 per client, and `shards` with
`split(validation=0.2)`, 480/120; SimFBO (Yang et al. 2023) and ASFBO `split(validation=0.25)`,
450/150.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbilevel.core import checks

Indices = NDArray[np.int64]
Labels = Tensor | NDArray[Any]


def iid(labels: Labels, clients: int, seed: int) -> list[Indices]:
    """Partition uniformly at random; sizes differ by at most one."""
    _check_clients(labels, clients)
    return np.array_split(_generator(seed).permutation(len(labels)), clients)


def shards(labels: Labels, clients: int, seed: int, per_client: int = 2) -> list[Indices]:
    """Sort by label, cut into shards, and give each client `per_client` of them.

    There are clients * per_client shards. If a class does not fill its last shard, that shard also
    holds samples of the next class, so that a client may see more than `per_client` labels.

    References:
        McMahan et al., "Communication-efficient learning of deep networks from decentralized
        data", 2017.
    """
    _check_clients(labels, clients)
    checks.integer("per_client", per_client, least=1, most=len(labels) // clients)
    rng = _generator(seed)
    cut = np.array_split(np.argsort(np.asarray(labels), kind="stable"), clients * per_client)
    assigned = rng.permutation(len(cut)).reshape(clients, per_client)
    return [rng.permutation(np.concatenate([cut[shard] for shard in own])) for own in assigned]


def dirichlet(labels: Labels, clients: int, seed: int, alpha: float = 0.5) -> list[Indices]:
    """Draw class proportions q_i ~ Dirichlet(alpha); split class k in the ratio q_1k : q_2k : ...

    Unlike in the reference, every sample is used, so that sizes differ. A client with fewer than 2
    samples takes some from the largest client.

    References:
        Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated
        visual classification", 2019.
    """
    _check_clients(labels, clients, each=2)
    checks.positive("alpha", alpha)
    rng = _generator(seed)
    classes, y = np.unique(np.asarray(labels), return_inverse=True)
    shape = (clients, len(classes))
    # A Gamma(alpha) variate is G U^(1/alpha) with G ~ Gamma(alpha + 1) and U uniform. We use its
    # logarithm, because for a small alpha all variates of a class may underflow.
    log_gamma = np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha
    shares = torch.from_numpy(log_gamma).log_softmax(1).softmax(0).numpy()
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for k, share in enumerate(shares.T):
        members = rng.permutation(np.flatnonzero(y == k))
        cuts = np.rint(share.cumsum()[:-1] * len(members)).astype(np.int64)
        for client, piece in enumerate(np.split(members, cuts)):
            pieces[client].append(piece)
    parts = [rng.permutation(np.concatenate(piece)).tolist() for piece in pieces]
    for part in parts:
        while len(part) < 2:
            part.append(max(parts, key=len).pop())
    return [np.array(part, dtype=np.int64) for part in parts]


def quantity(labels: Labels, clients: int, seed: int, alpha: float = 0.5) -> list[Indices]:
    """Partition at random into parts of unequal size: sizes ~ Dirichlet(alpha), at least 2 each.

    References:
        Li, Diao, Chen, He, "Federated learning on non-IID data silos", 2022.
    """
    _check_clients(labels, clients, each=2)
    checks.positive("alpha", alpha)
    rng = _generator(seed)
    spare = len(labels) - 2 * clients
    shares = rng.dirichlet([alpha] * clients)
    cuts = np.rint(shares.cumsum()[:-1] * spare).astype(np.int64) + 2 * np.arange(1, clients)
    return np.split(rng.permutation(len(labels)), cuts)


def feature_shift(inputs: Tensor, clients: int, seed: int) -> list[Indices]:
    """Give each client a slice of the first principal component of the inputs, of equal size."""
    _check_clients(inputs, clients)
    rng = _generator(seed)
    flat = inputs.flatten(1).double()
    _, _, directions = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    slices = np.array_split((flat @ directions[0]).argsort(stable=True).numpy(), clients)
    return [rng.permutation(slices[number]) for number in rng.permutation(clients)]


def split(indices: Indices, validation: float, seed: int, client: int) -> tuple[Indices, Indices]:
    """Split one client's samples into training and validation samples, neither of them empty.

    The result does not depend on the samples of other clients.
    """
    if not 0 < checks.number("validation", validation) < 1:
        raise ValueError(f"validation is {validation}; it must be above 0 and below 1")
    if len(indices) < 2:
        raise ValueError(
            f"indices of client {client} hold {len(indices)} samples; a split needs at least 2"
        )
    shuffled = _generator(seed, client).permutation(indices)
    held_out = min(max(round(validation * len(indices)), 1), len(indices) - 1)
    return shuffled[held_out:], shuffled[:held_out]


def by_name(
    name: str,
    labels: Labels,
    clients: int,
    seed: int,
    *,
    inputs: Tensor | None = None,
    **options: float,
) -> list[Indices]:
    """Partition by the name of a partition.

    It is "iid", "shards" (option per_client), "dirichlet" or "quantity" (option alpha), or
    "feature-shift", which needs the inputs.
    """
    partitions: dict[str, Callable[..., list[Indices]]] = {
        "iid": iid,
        "shards": shards,
        "dirichlet": dirichlet,
        "quantity": quantity,
    }
    if inputs is not None:
        partitions["feature-shift"] = feature_shift
    partition = partitions[checks.one_of("partition", name, partitions)]
    known = list(signature(partition).parameters)[3:]
    for option in options:
        if not known:
            raise ValueError(f"option of partition {name!r} is {option!r}; this partition has none")
        checks.one_of(f"option of partition {name!r}", option, known)
    if partition is feature_shift:
        return feature_shift(cast(Tensor, inputs), clients, seed)
    return partition(labels, clients, seed, **options)


def _generator(seed: int, *key: int) -> np.random.Generator:
    checks.integer("seed", seed, least=0)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _check_clients(labels: Labels, clients: int, each: int = 1) -> None:
    if checks.integer("clients", clients, least=1) * each > len(labels):
        raise ValueError(
            f"clients is {clients}; it must be at most {len(labels) // each} "
            f"for {len(labels)} samples"
        )
