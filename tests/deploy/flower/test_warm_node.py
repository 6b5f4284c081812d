"""The warm node, and what it uses of Flower's internals."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable import inflatable_utils

from fedbilevel.deploy.flower import keys, warm_node


def test_the_installed_flower_is_the_version_that_was_tested() -> None:
    """Another release may have changed what `warm_node` imports: read its changes first."""
    assert importlib.metadata.version("flwr") == warm_node.FLWR_VERSION


def test_missing_objects_of_a_message_are_polled_often_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server_side = inflatable_utils.pull_objects
    client_side = inflatable_utils.pull_and_inflate_object_from_tree
    for function in (server_side, client_side):
        monkeypatch.setattr(function, "__kwdefaults__", dict(function.__kwdefaults__))
    warm_node.patch_flower_pull_backoff()
    pulled: list[str] = []

    def pull_missing(object_id: str) -> bytes:
        pulled.append(object_id)
        raise inflatable_utils.ObjectUnavailableError(object_id)

    for function, arguments in (
        (server_side, (["a"], pull_missing)),
        (client_side, (ObjectTree(object_id="a"), pull_missing, pulled.append)),
    ):
        function.__kwdefaults__["max_time"] = 0.1  # instead of a minute
        pulled.clear()
        with pytest.raises(inflatable_utils.ObjectPullError):
            function(*arguments)
        assert len(pulled) > 2


def test_a_node_reads_the_keys_that_we_make_and_refuses_other_files(tmp_path: Path) -> None:
    keys.make(tmp_path, 1, ["localhost"])
    _, public = warm_node.load_key_pair(tmp_path / "clients/client-0")
    assert public.curve.name == "secp384r1"
    with pytest.raises(ValueError, match="is not a private key"):
        warm_node.load_key_pair(tmp_path / keys.SERVER)
