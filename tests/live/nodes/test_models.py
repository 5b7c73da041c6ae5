"""How models reach nodes: named by the hash of their files, sent once, kept within a bound, or seen by both."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
from pathlib import Path

import pytest

from cotenant.backends.cpu import Cpu
from cotenant.core.identity import DeviceId, LaneId
from cotenant.errors import ModelError, NodeError
from cotenant.live.nodes.messages import ModelFile
from cotenant.live.nodes.model_files import FolderReader, digest_of, inner_path
from cotenant.live.nodes.model_store import PART, ModelStore
from cotenant.worker.wire import WorkerModel
from tests.live.nodes.agents import agent_of, nodes_of, remote_pool, up
from tests.live.workers import floats
from tests.worker import graphs

LANE = LaneId(DeviceId("cpu", node="node-a"), 0)


def repository(root: Path, *, width: int = 2) -> WorkerModel:
    """A model with two versions, and files beside them; the second is served."""
    folder = root / "identity"
    for version in ("1", "2"):
        (folder / version).mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"an older one")
    (folder / "config.pbtxt").write_text("max_batch_size: 8\n")
    (folder / "2" / "weights.bin").write_bytes(os.urandom(2 * PART + 17))
    (folder / "2" / "empty").touch()
    return graphs.identity(folder / "2" / "model.onnx", width)


def test_folder_holds_the_version_and_what_lies_beside_the_versions(tmp_path: Path) -> None:
    model = repository(tmp_path)
    (tmp_path / "secret").write_text("of somebody else")
    (tmp_path / "identity" / "2" / "leads_out").symlink_to(tmp_path / "secret")
    (tmp_path / "identity" / "2" / "leads_in").symlink_to(tmp_path / "identity" / "config.pbtxt")
    folder = FolderReader().read(Path(model.path))
    assert folder.root == tmp_path / "identity" and folder.path == "2/model.onnx"
    assert [file.path for file in folder.files] == [
        "2/empty",
        "2/leads_in",
        "2/model.onnx",
        "2/weights.bin",
        "config.pbtxt",
    ]


def test_digest_changes_with_names_and_contents_alone(tmp_path: Path) -> None:
    model, reader = repository(tmp_path), FolderReader()
    first = reader.read(Path(model.path)).digest
    os.utime(model.path, (0, 0))
    assert reader.read(Path(model.path)).digest == FolderReader().read(Path(model.path)).digest == first
    (tmp_path / "identity" / "config.pbtxt").write_text("max_batch_size: 4\n")
    changed = reader.read(Path(model.path)).digest
    (tmp_path / "identity" / "config.pbtxt").rename(tmp_path / "identity" / "other.pbtxt")
    assert len({first, changed, reader.read(Path(model.path)).digest}) == 3


def test_file_in_no_version_stands_for_itself(tmp_path: Path) -> None:
    model = graphs.identity(tmp_path / "m.onnx", 2)
    (tmp_path / "other").touch()
    folder = FolderReader().read(Path(model.path))
    assert (folder.path, [file.path for file in folder.files]) == ("m.onnx", ["m.onnx"])
    with pytest.raises(ModelError, match=r"nothing\.onnx: cannot read the model: No such file or directory"):
        FolderReader().read(tmp_path / "nothing.onnx")


def test_model_is_sent_once_and_survives_the_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = repository(tmp_path / "models")

    async def scenario() -> None:
        async with agent_of(Cpu(), tmp_path / "cache") as agent, nodes_of(agent.address) as nodes:
            await up(nodes)
            async with remote_pool(nodes) as (pool, told):
                await pool.start(LANE, share=500, models=[model])
                await told.next()
                pool.run(LANE, 1, "identity", [floats(1, 2)])
                assert (await told.next())[0] == "finished"

    with caplog.at_level(logging.INFO, logger="cotenant.live.nodes"):
        for _ in range(2):
            asyncio.run(scenario())
    assert [record.message for record in caplog.records if "is sent to" in record.message] == [
        "model identity is sent to node-a"
    ]
    (kept,) = (tmp_path / "cache").iterdir()
    assert (kept / "2" / "weights.bin").read_bytes() == (
        tmp_path / "models" / "identity" / "2" / "weights.bin"
    ).read_bytes()


def test_model_that_both_see_is_not_sent(tmp_path: Path) -> None:
    model = repository(tmp_path / "models")
    repository(tmp_path / "other")  # other weights under the same name

    async def scenario(seen: str) -> int:
        async with (
            agent_of(Cpu(), tmp_path / f"cache-{seen}", repository=tmp_path / seen) as agent,
            nodes_of(agent.address) as nodes,
        ):
            await up(nodes)
            async with remote_pool(nodes) as (pool, told):
                await pool.start(LANE, share=500, models=[model])
                await told.next()
        return len(list((tmp_path / f"cache-{seen}").iterdir()))

    assert asyncio.run(scenario("models")) == 0
    assert asyncio.run(scenario("other")) == 1
    assert asyncio.run(scenario("absent")) == 1


def offer(name: str, size: int) -> tuple[bytes, tuple[ModelFile, ...], bytes]:
    data = name.encode() * size
    files = (ModelFile("a", len(data), hashlib.sha256(data).digest()),)
    return digest_of(files), files, data


def test_models_used_longest_ago_make_room_for_others(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, 1000)

    def keep(name: str, *in_use: Path) -> Path:
        digest, files, data = offer(name, 400)
        found = store.find(digest, "model", files)
        if found is None:
            found = store.receive(digest, files, in_use).take(0, 0, data)
        assert found is not None
        return found

    a, b = keep("a"), keep("b")
    os.utime(b, (0, 0))
    c = keep("c")
    assert a.exists() and c.exists() and not b.exists()
    os.utime(a, (0, 0))
    keep("d", a)  # which runs, and stays
    assert a.exists() and not c.exists()
    assert keep("a") == a


def test_kept_model_that_has_changed_is_sent_again(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, 1000)
    digest, files, data = offer("a", 10)
    kept = store.receive(digest, files, ()).take(0, 0, data)
    assert kept is not None and store.find(digest, "model", files) == kept
    (kept / "a").write_bytes(b"changed")
    assert store.find(digest, "model", files) is None and not kept.exists()


def test_kept_model_that_is_removed_while_it_is_looked_at_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ModelStore(tmp_path, 1000)
    digest, files, data = offer("a", 10)
    assert store.receive(digest, files, ()).take(0, 0, data) is not None
    utime = os.utime

    def removed(folder: Path) -> None:
        shutil.rmtree(folder)
        utime(folder)

    monkeypatch.setattr(os, "utime", removed)
    assert store.find(digest, "model", files) is None


def test_model_that_was_half_received_is_forgotten_at_the_next_start(tmp_path: Path) -> None:
    digest, files, data = offer("a", 10)
    ModelStore(tmp_path, 1000).receive(digest, files, ()).take(0, 0, data[:4])
    assert len(list(tmp_path.iterdir())) == 1
    ModelStore(tmp_path, 1000)
    assert list(tmp_path.iterdir()) == []


def test_inner_path_is_taken_as_it_is() -> None:
    assert inner_path("1/folder/model.onnx") == Path("1/folder/model.onnx")
    with pytest.raises(NodeError):
        inner_path("1/../../x")
