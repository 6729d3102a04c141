"""Where checkpoints may lie, as text: a URL names a place and can hide nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from protocol.base.errors import BadInputError
from protocol.run.places import above, check_url, is_url, lies_below, local_folder
from protocol.run.run import CheckpointSection, RunConfig


@pytest.mark.parametrize(
    "url",
    ["s3://bucket", "s3://bucket/", "s3://my.bucket-1/a/b_c", "gs://b/run=1", "az://container/x", "file:///shared/x"],
)
def test_a_place_is_accepted_and_shared(url: str) -> None:
    """All servers write to it, as to a folder that all share."""
    config = msgspec.structs.replace(RunConfig(), checkpoint=CheckpointSection(folder=url))
    config.validate()
    assert config.checkpoint.is_url and config.checkpoint.shared
    assert f"`barnraise export OUT {url}`" in config.checkpoint.export_hint()


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEYPLANTED:planted@bucket/x", "s3://bucket/x?sig=planted", "s3://bucket/x#planted", "s3://bucket:443/x",
        "s3://bucket/a/../planted", "s3://bucket/%2e%2e/planted", "s3://bucket//planted", "s3://", "s3:///planted",
        "s3://../planted", "file://planted/x", "file://", "file:///", "https://planted/x", "http://169.254.169.254/planted",
        "s3a://planted/x", "memory://planted", "s3://bucket/pl anted", "S3://planted", "s3://bucket/planted\\x",
    ],
)  # fmt: skip
def test_what_is_no_place_or_hides_something_is_refused(url: str) -> None:
    """And no part of it that could be a key stands in the sentence."""
    config = msgspec.structs.replace(RunConfig(), checkpoint=CheckpointSection(folder=url))
    with pytest.raises(BadInputError, match=r"^checkpoint\.folder: ") as caught:
        config.validate()
    assert "planted" not in str(caught.value).lower()


def test_a_path_is_no_url() -> None:
    """Whatever a folder is called."""
    for path in ("checkpoints", "/shared", "./s3:/bucket", "C:\\x"):
        assert not is_url(path) and local_folder(path) == Path(path)
    assert local_folder("file:///shared/x") == Path("/shared/x") and local_folder("s3://b/x") is None


def test_below_is_by_names_in_the_same_bucket_of_the_same_store() -> None:
    """Not by letters that begin alike."""
    for place in ("s3://b/x", "s3://b/x/y", "s3://b/x/"):
        assert lies_below(place, "s3://b/x") and lies_below(place, "s3://b")
    for place in ("s3://b/xy", "s3://b", "s3://bb/x", "gs://b/x", "s3://b/../b/x", "/x", "file:///x"):
        assert not lies_below(place, "s3://b/x")
    assert not lies_below("file:///x", "file:///x"), "folders have links, and are compared as folders"


def test_levels_up() -> None:
    """Of a manifest's name: the run's own place."""
    assert above("s3://b/run/step/manifest.json", 2) == "s3://b/run"
    assert above("/shared/run/step/manifest.json", 2) == "/shared/run"
    with pytest.raises(BadInputError, match="ftp:// is no place"):
        check_url("it", "ftp://host/x")
