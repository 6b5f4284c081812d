"""How samples are dealt to clients: one array of sample indices a client, disjoint, exhaustive, shuffled.

Splits of published experiments, each with 100 clients on MNIST's 60,000 training samples: FedNest (Tarzanagh et al.
2022) uses `iid` with `split(validation=0.5)`, 300/300 a client, and `shards` with `split(validation=0.2)`, 480/120;
SimFBO (Yang et al. 2023) and ASFBO use 450/150, `split(validation=0.25)`.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbilevel.core import checks

Indices = NDArray[np.int64]
Labels = Tensor | NDArray[Any]


def iid(labels: Labels, clients: int, seed: int) -> list[Indices]:
    """Uniformly at random; sizes differ by one at most."""
    _check_clients(labels, clients)
    return np.array_split(_generator(seed).permutation(len(labels)), clients)


def shards(labels: Labels, clients: int, seed: int, per_client: int = 2) -> list[Indices]:
    """Sorted by label and cut into clients * per_client shards, of which each client is dealt per_client.

    McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017. Where a class
    does not fill its last shard, that shard holds the next class too, so a client may see a few labels more.
    """
    _check_clients(labels, clients)
    checks.integer("per_client", per_client, least=1, most=len(labels) // clients)
    rng = _generator(seed)
    cut = np.array_split(np.argsort(np.asarray(labels), kind="stable"), clients * per_client)
    dealt = rng.permutation(len(cut)).reshape(clients, per_client)
    return [rng.permutation(np.concatenate([cut[shard] for shard in hand])) for hand in dealt]


def dirichlet(labels: Labels, clients: int, seed: int, alpha: float = 0.5) -> list[Indices]:
    """Client i draws class proportions q_i ~ Dirichlet(alpha); class k is dealt in the ratio of q_1k : q_2k : ...

    Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual classification",
    2019, but exhaustive, so that sizes differ. A client left with fewer than 2 samples takes from the largest.
    """
    _check_clients(labels, clients, each=2)
    checks.positive("alpha", alpha)
    rng = _generator(seed)
    classes, y = np.unique(np.asarray(labels), return_inverse=True)
    shape = (clients, len(classes))
    # A Gamma(alpha) variate is G U^(1/alpha), G ~ Gamma(alpha + 1), U uniform: its logarithm survives a small alpha,
    # for which all the variates of a class may underflow.
    log_gamma = np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha
    shares = torch.from_numpy(log_gamma).log_softmax(1).softmax(0).numpy()
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for k, share in enumerate(shares.T):
        members = rng.permutation(np.flatnonzero(y == k))
        cuts = np.rint(share.cumsum()[:-1] * len(members)).astype(np.int64)
        for client, piece in enumerate(np.split(members, cuts)):
            pieces[client].append(piece)
    held = [rng.permutation(np.concatenate(piece)).tolist() for piece in pieces]
    for indices in held:
        while len(indices) < 2:
            indices.append(max(held, key=len).pop())
    return [np.array(indices, dtype=np.int64) for indices in held]


def split(indices: Indices, validation: float, seed: int, client: int) -> tuple[Indices, Indices]:
    """One client's (training, validation) samples, whatever the other clients hold; neither part is empty."""
    if not 0 < checks.number("validation", validation) < 1:
        raise ValueError(f"validation is {validation}; it must be above 0 and below 1")
    if len(indices) < 2:
        raise ValueError(
            f"indices of client {client} hold {len(indices)} samples; a split needs at least 2"
        )
    shuffled = _generator(seed, client).permutation(indices)
    held_out = min(max(round(validation * len(indices)), 1), len(indices) - 1)
    return shuffled[held_out:], shuffled[:held_out]


def by_name(name: str, labels: Labels, clients: int, seed: int, **options: float) -> list[Indices]:
    """The partition "iid", "shards" (option per_client) or "dirichlet" (option alpha)."""
    partitions: dict[str, Callable[..., list[Indices]]] = {
        "iid": iid,
        "shards": shards,
        "dirichlet": dirichlet,
    }
    partition = partitions[checks.one_of("partition", name, partitions)]
    known = list(signature(partition).parameters)[3:]
    for option in options:
        if not known:
            raise ValueError(f"option of partition {name!r} is {option!r}; this partition has none")
        checks.one_of(f"option of partition {name!r}", option, known)
    return partition(labels, clients, seed, **options)


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(
        np.random.SeedSequence(checks.integer("seed", seed, least=0), spawn_key=key)
    )


def _check_clients(labels: Labels, clients: int, each: int = 1) -> None:
    if checks.integer("clients", clients, least=1) * each > len(labels):
        raise ValueError(
            f"clients is {clients}; it must be at most {len(labels) // each} for {len(labels)} samples"
        )
