"""A checkpoint restores on any plan, or is refused: never other values."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from holmesjax.checkpoints import (
    manifest,
    newest_whole,
    reading,
    restoring,
    second_reading,
    writing,
)
from holmesjax.config import ExpertsConfig, LoraConfig
from holmesjax.errors import CheckpointError, DamagedError, PeerError
from holmesjax.runtime.chunk import ChunkState
from tests.disks import files_of_at_most
from tests.hand_made_plans import SMOOTH, hand_made_plan, make_chunks, make_model
from tests.one_device import wide_moments
from tests.written_checkpoints import (
    PLANS,
    SMALL,
    damage,
    folders,
    random_states,
    retention,
    write,
    write_states,
)


def chunks_of(name, model):
    return make_chunks(model, PLANS[name])


EXPERTS = {
    "pattern": ("block", "expert_block"),
    "experts": ExpertsConfig(count=8, active=2, bias_rate=0.01),
}


@pytest.mark.parametrize(
    "source, targets, changes",
    [
        ("two", ("one", "four"), {"tied_embeddings": True}),
        ("one", ("two", "three"), {}),
        ("four", ("three", "two"), {}),
        ("three", ("four", "one"), {"tied_embeddings": True}),
        ("experts in four", ("experts in two", "one"), EXPERTS),
        ("two", ("experts in four",), EXPERTS),
    ],
)
def test_any_plan_restores_any_other(tmp_path, monkeypatch, source, targets, changes):
    """Each plan is read onto others, and each reads from others: a file names no plan.

    Some arrays at a time, which are a sign of progress.
    """
    monkeypatch.setattr(reading, "GROUP_BYTES", 20_000)
    model = make_model(**changes)
    write(tmp_path, model, source)
    [found] = manifest.find(tmp_path)
    manifest.verify(found)
    for target in targets:
        chunks, before = chunks_of(target, model), reading.read_arrays.count
        restored = restoring.restore(found, chunks)
        shapes = [restoring.flatten(chunk.state_shapes) for chunk in chunks]
        assert reading.read_arrays.count - before == sum(map(len, shapes))
        for chunk, state, want in zip(chunks, restored, random_states(chunks), strict=True):
            wanted = restoring.flatten(want)
            shapes = restoring.flatten(chunk.state_shapes)
            for key, got in restoring.flatten(state).items():
                where = f"{key} of {target}"
                assert got.sharding == shapes[key].sharding, where
                np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted[key]), where)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_every_array_of_the_model_is_saved_once_and_the_count_of_updates_by_each_stage(name, tied):
    """A last stage that reads the table of the first, as a tied model's does, does not save it."""
    model = make_model(tied_embeddings=tied)
    [whole] = make_chunks(model, hand_made_plan((4,), 1, 1))
    chunks = chunks_of(name, model)
    saved = Counter(key for s in chunks for key in writing.owned(s, s.state_shapes))
    assert saved.pop("opt_state.updates") == len(chunks)
    once = restoring.flatten(whole.state_shapes).keys() - {"opt_state.updates"}
    assert saved == dict.fromkeys(once, 1)


def as_float32(states):
    """Moments by name."""
    found = {}
    for state in states:
        mu, nu = state.opt_state.mu, state.opt_state.nu
        wide = {"mu": wide_moments(mu, "first"), "nu": wide_moments(nu, "second")}
        found |= restoring.flatten(wide)
    return found


@pytest.mark.parametrize(
    "source, target, plan",
    [
        ("float32", "int8", hand_made_plan((2,), 1, 1, fsdp=2)),
        ("int8", "int8", hand_made_plan((1, 1), (1, 2), 1)),
        pytest.param(
            *("bfloat16", "float32", hand_made_plan((2,), 2, 1)), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_moments_may_be_kept_in_another_way(tmp_path, source, target, plan):
    model = make_model(width=128, num_heads=2, num_layers=2)
    keeping = lambda plan, kept: make_chunks(
        model, plan, config=dataclasses.replace(SMOOTH, moments=kept)
    )
    two = hand_made_plan((1, 1), 2, 2)
    chunks = keeping(two, source)
    states = []
    for chunk, state in zip(chunks, random_states(keeping(two, "float32")), strict=True):
        opt_state = state.opt_state._replace(nu=jax.tree.map(jnp.square, state.opt_state.nu))
        where = jax.tree.map(lambda x: x.sharding, chunk.state_shapes.opt_state)
        adopt = jax.jit(chunk.optimizer.adopt, out_shardings=where)
        states.append(ChunkState(state.params, adopt(opt_state), {}))
    write_states(tmp_path, model, chunks, (10,), states=states)
    [found] = manifest.find(tmp_path)
    others = keeping(plan, target)
    restored = restoring.restore(found, others)
    for chunk, state in zip(others, restored, strict=True):
        shapes = restoring.flatten(chunk.state_shapes)
        for key, x in restoring.flatten(state).items():
            assert (x.dtype, x.sharding) == (shapes[key].dtype, shapes[key].sharding)
    want, got = as_float32(states), as_float32(restored)
    assert want.keys() == got.keys()
    for key, x in want.items():
        # Two codes next to each other differ by at most 4 / 255 of their block's largest number.
        near = {"int8": 4 / 255 * np.abs(x).max(), "bfloat16": 2.0**-7 * np.abs(x)}
        is_kept = target in ("float32", source)
        assert np.all(np.abs(got[key] - x) <= (0 if is_kept else near[target] + 1e-12)), key


def test_an_average_may_begin_or_end_with_a_resumption(tmp_path):
    model, config = make_model(num_layers=2), dataclasses.replace(SMOOTH, ema_decay=0.9)
    two, one = hand_made_plan((1, 1), 1, 2), hand_made_plan((2,), 2, 1, fsdp=2)
    with_average, without = (make_chunks(model, two, config=c) for c in (config, SMOOTH))
    others = make_chunks(model, one, config=config)
    for name, chunks in (("with", with_average), ("without", without)):
        write_states(tmp_path / name, model, chunks, (10,))
    of = {name: manifest.find(tmp_path / name)[0] for name in ("with", "without")}
    [kept], [begun] = (restoring.restore(of[name], others) for name in of)
    [wanted] = random_states(others)
    ended = restoring.restore(of["with"], make_chunks(model, one))
    assert [state.average for state in ended] == [None]
    np.testing.assert_array_equal(begun.average.updates, 0)
    saved, first = kept.average.weights, begun.average.weights
    jax.tree.map(np.testing.assert_array_equal, saved, wanted.average.weights)
    jax.tree.map(np.testing.assert_array_equal, first, begun.params)
    read = restoring.restore_params(of["with"], model, ema=True)
    jax.tree.map(np.testing.assert_array_equal, read, saved)
    assert not np.array_equal(read["head"]["output_DV"], kept.params["head"]["output_DV"])
    with pytest.raises(CheckpointError, match="has no average of the weights"):
        restoring.restore_params(of["without"], model, ema=True)


@pytest.mark.parametrize("was, now", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_goes_on_with_other_dtypes_on_another_plan(tmp_path, was, now):
    """The average has the trained weights and the frozen ones; all are float32."""
    model = make_model(num_layers=2, lora=LoraConfig(rank=4))
    config = dataclasses.replace(SMOOTH, ema_decay=0.9)
    in_dtype = lambda plan, dtype: [
        dataclasses.replace(chunk, param_dtype=dtype)
        for chunk in make_chunks(model, plan, dtype=dtype, config=config)
    ]
    chunks = in_dtype(hand_made_plan((1, 1), 2, 2), was)
    states = random_states(chunks)
    write_states(tmp_path, model, chunks, (10,), states=states)
    [found] = manifest.find(tmp_path)
    others = in_dtype(hand_made_plan((2,), 1, 1, fsdp=2), now)
    got = {}
    for chunk, state in zip(others, restoring.restore(found, others), strict=True):
        shapes = restoring.flatten(chunk.state_shapes)
        for key, x in restoring.flatten(state).items():
            assert (x.dtype, x.sharding) == (shapes[key].dtype, shapes[key].sharding)
            got[key] = np.asarray(x)
    for key, x in restoring.flatten(states).items():
        name = key.partition(".")[2]
        if not name.endswith("updates"):
            np.testing.assert_array_equal(got[name], np.asarray(x).astype(got[name].dtype), name)


def test_a_checkpoint_of_another_format_or_with_files_elsewhere_is_refused(tmp_path):
    """The checkpoint is older than the settings of a run in it."""
    write(tmp_path)
    [found] = manifest.find(tmp_path)
    content = found.manifest | {"format": 3}
    del content["settings"]
    content["sha256"] = manifest._manifest_sha256(content)
    (found.path / manifest.MANIFEST).write_text(json.dumps(content))
    [found] = manifest.find(tmp_path)
    with pytest.raises(CheckpointError, match=f"is damaged, or not of format {manifest.FORMAT}"):
        manifest.verify(found)
    for name in ("../../secret", "/etc/passwd", "part_0/../../secret", "part_0/\0"):
        (tmp_path / manifest.FOLDER / "secret").write_text("")
        content = content | {"format": manifest.FORMAT}
        content |= {"files": {name: {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}}}
        content["sha256"] = manifest._manifest_sha256(content)
        (found.path / manifest.MANIFEST).write_text(json.dumps(content))
        [other] = manifest.find(tmp_path)
        with pytest.raises(CheckpointError, match="names a file outside its folder"):
            manifest.verify(other)


FORMS = [("files", ["x"]), ("files", {"x": 7}), ("files", {"x": {"bytes": "1", "sha256": None}})]
FORMS += [("step", "4"), ("stores", [1]), ("stores", {"part_0": 3}), ("arrays", {"params.x": 1})]


@pytest.mark.parametrize("name, value", FORMS)
def test_a_manifest_of_another_form_is_refused_whoever_has_signed_it(tmp_path, name, value):
    path = manifest.begin(tmp_path, 4)
    text = json.dumps({"format": manifest.FORMAT, "step": 4, "files": {}})
    for change, is_good in (({}, True), ({name: value}, False)):
        (path / manifest.MANIFEST).write_text(manifest.text_of(json.loads(text) | change))
        [found] = manifest.find(tmp_path)
        assert manifest.is_sound(found.manifest) == is_good


def test_parameters_alone_for_sampling_from_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_model()
    write("run", model, "two")
    [found] = manifest.find("run")
    params = restoring.restore_params(found, model)
    [want] = random_states(chunks_of("one", model))
    wanted = restoring.flatten({"params": want.params})
    assert restoring.flatten({"params": params}).keys() == wanted.keys()
    for key, got in restoring.flatten({"params": params}).items():
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted[key]))


def test_orbax_and_tensorstore_open_it_as_the_documents_say(tmp_path):
    model = make_model()
    write(tmp_path, model, "two")
    [found] = manifest.find(tmp_path)
    wanted = restoring.flatten(random_states(chunks_of("two", model)))
    text = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    with_orbax, with_tensorstore = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for lines in (with_orbax, with_tensorstore):
        assert len(list(filter(None, lines.splitlines()))) <= 5
    got = {}
    for name in ("part_0", "part_1"):
        values = {"part": str(found.path / name)}
        exec(with_orbax, values)
        got |= values["arrays"]
    assert got.keys() == found.manifest["arrays"].keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(got[key.partition(".")[2]], array)  # after the stage's number
    values = {"part": str(found.path / "part_0")}
    exec(with_tensorstore, values)
    np.testing.assert_array_equal(values["array"], got["params.block_000.up_DF"])


def test_keeps_the_newest(tmp_path):
    write(tmp_path, steps=(1, 2, 3, 4), keep=2)
    assert [checkpoint.step for checkpoint in manifest.find(tmp_path)] == [4, 3]
    folders = sorted(path.name for path in (tmp_path / manifest.FOLDER).iterdir())
    assert folders == ["step_00000003", "step_00000004"]


def test_every_damaged_file_is_noticed(tmp_path):
    """One flipped bit, in each file in turn; a file cut short; a file gone."""
    write(tmp_path)
    [found] = manifest.find(tmp_path)
    files = [path for path in found.path.rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in files:
        whole = path.read_bytes()
        flipped = bytearray(whole or b"\0")
        flipped[len(flipped) // 2] ^= 1
        for damaged in (bytes(flipped), whole[: len(whole) // 2] if whole else b"x", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            newest = manifest.find(tmp_path)
            if newest:  # without a manifest it is no checkpoint at all
                with pytest.raises(DamagedError, match=r"is damaged|is missing"):
                    manifest.verify(newest[0])
            else:
                assert path.name == manifest.MANIFEST
                assert damaged is None
            path.write_bytes(whole)
    manifest.verify(found)


def test_a_flipped_byte_of_a_large_file_is_noticed_by_whoever_reads_it(tmp_path, monkeypatch):
    """Wherever it is: arrays are restored as they were written, or not at all."""
    monkeypatch.setattr(manifest, "SMALL_BYTES", 0)
    chunks = make_chunks(SMALL, hand_made_plan((1,), 1, 1))
    write_states(tmp_path, SMALL, chunks, (10,))
    [found] = manifest.find(tmp_path)
    large = [name for name, what in found.manifest["files"].items() if not what["sha256"]]
    want = random_states(chunks)
    num_noticed = 0
    for name in large:
        path = found.path / name
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        path.write_bytes(flipped)
        manifest.verify(found)
        try:
            states = restoring.restore(found, chunks)
        except DamagedError:
            num_noticed += 1
        else:  # it is in what no array is read from
            jax.tree.map(np.testing.assert_array_equal, states, want)
        path.write_bytes(whole)
    assert num_noticed >= 2, large
    path = found.path / max(large, key=lambda name: (found.path / name).stat().st_size)
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    begin, end = whole.size // 4, whole.size // 2  # numbers of arrays, whatever else is there
    path.write_bytes(np.r_[whole[:begin], ~whole[begin:end], whole[end:]].tobytes())
    with pytest.raises(DamagedError, match="its arrays cannot be read"):
        restoring.restore(found, chunks)


def test_what_a_crash_leaves_behind_is_no_checkpoint(tmp_path):
    write(tmp_path, steps=(5, 6))
    unfinished = tmp_path / manifest.FOLDER / "step_00000006"
    (unfinished / manifest.MANIFEST).unlink()
    assert [checkpoint.step for checkpoint in manifest.find(tmp_path)] == [5]
    retention(tmp_path).after_start()
    assert not unfinished.exists()


def test_two_processes_must_find_a_checkpoint_damaged(tmp_path):
    """One reads what it has in memory; the other reads the disk, with the arrays of that part."""
    write(tmp_path)
    [found] = manifest.find(tmp_path)
    said = manifest.damaged(found, "part_0", "is damaged: the digest of x should be 1", "2")
    with pytest.raises(PeerError, match="another process has read it as it was written"):
        second_reading.confirm(found, said)
    key = next(iter(found.manifest["arrays"]))
    content = dict(found.manifest, arrays={key: found.manifest["arrays"][key] | {"digest": "1"}})
    content["sha256"] = manifest._manifest_sha256(content)
    (found.path / manifest.MANIFEST).write_text(json.dumps(content))
    with pytest.raises(PeerError):  # the manifest and its files are as they say
        second_reading.confirm(found, manifest.damaged(found, "", "is damaged", ""))
    said.where = f"a/a-0 (stage 0, process 0): {said.where}"  # as a launcher tells it
    second_reading.confirm(found, said)
    path = found.path / "part_0" / next(iter(found.manifest["files"])).partition("/")[2]
    path.unlink()
    second_reading.confirm(found, manifest.damaged(found, f"part_0/{path.name}", "is missing", ""))


@pytest.mark.parametrize(
    "number, kind",
    [(errno.ESTALE, PeerError), (errno.EACCES, CheckpointError), (errno.EIO, DamagedError)],
)
def test_arrays_that_are_withheld_are_no_damage(tmp_path, monkeypatch, number, kind):
    """The text is TensorStore's own, of a file whose mode is 0."""
    write(tmp_path)
    [found] = manifest.find(tmp_path)

    def fails(*how):
        raise ValueError(f"PERMISSION_DENIED: Error opening [os_error_code='{number}'] [x='y']")

    monkeypatch.setattr(reading, "_read_numpys", fails)
    with pytest.raises(kind) as error:
        reading.verify_arrays(found, "part_0")
    assert type(error.value) is kind
    assert str(error.value.found) == os.strerror(number)


def resume(run_dir, **how):
    """The step from which a run goes on, and what is said."""
    said = []
    found = newest_whole.find(run_dir, said.append, **{"move": Path.rename, **how})
    if how.get("move", True):
        retention(run_dir).after_start()
    return found and found.step, "\n".join(said)


def test_a_damaged_checkpoint_is_set_aside_and_evicts_no_other(tmp_path):
    write(tmp_path, steps=(10, 20), keep=2)
    for name in ("step_00000020.damaged", "step_00000020.2.damaged"):  # the second time, too
        damage(tmp_path, 20)
        step, said = resume(tmp_path)
        assert step == 10
        assert str(tmp_path / manifest.FOLDER / name) in said
        assert name in folders(tmp_path)
        # A new one, of a smaller number than the damaged one, stays; so does the one before.
        write(tmp_path, steps=(15,), keep=1)
        assert [checkpoint.step for checkpoint in manifest.find(tmp_path)] == [15]
        write(tmp_path, steps=(10,), keep=2)
        other = manifest.folder_of(tmp_path, 20)
        manifest.folder_of(tmp_path, 15).rename(other)
        assert resume(tmp_path, move=None)[0] == 10  # of step 15, in a folder of 20
        shutil.rmtree(other)
        write(tmp_path, steps=(20,), keep=2)  # the run has come to the same step again
        assert [checkpoint.step for checkpoint in manifest.find(tmp_path)] == [20, 10]


def test_a_reader_renames_nothing(tmp_path):
    write(tmp_path, steps=(10, 20))
    damage(tmp_path, 20)
    before = folders(tmp_path)
    step, said = resume(tmp_path, move=None)
    assert step == 10
    assert "is damaged" in said
    assert folders(tmp_path) == before


def test_where_no_checkpoint_is_whole_nothing_is_renamed_or_begun_anew(tmp_path):
    write(tmp_path, steps=(10, 20))
    damage(tmp_path, 10)
    damage(tmp_path, 20)
    before = folders(tmp_path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="is damaged") as error:
            resume(tmp_path)
        assert "older one" not in error.value.fix
        assert error.value.fix.endswith("no other is whole: to begin anew, use another run.dir")
        assert folders(tmp_path) == before


def test_what_is_newer_than_a_new_checkpoint_neither_counts_nor_goes(tmp_path):
    write(tmp_path, steps=(30, 10, 20), keep=2)
    assert [checkpoint.step for checkpoint in manifest.find(tmp_path)] == [30, 20, 10]


@pytest.mark.parametrize("other", [{"width": 64}, {"norm": "rms_norm"}, {"num_layers": 2}])
def test_other_arrays_are_refused_before_any_is_read(tmp_path, other, monkeypatch):
    """The settings are the same, and the code has changed their meaning."""
    write(tmp_path)
    [found] = manifest.find(tmp_path)
    model = dataclasses.replace(SMALL, **other)
    chunks = make_chunks(model, hand_made_plan((model.num_layers,), 2, 1))
    monkeypatch.setattr(restoring, "read_tree", lambda *_: pytest.fail("something is read"))
    saved, wanted = (
        {key: f"{x.dtype}{list(x.shape)}".replace(" ", "") for key, x in arrays.items()}
        for arrays in (found_arrays(found), restoring.flatten(chunks[0].state_shapes))
    )
    differ = [key for key in saved | wanted if saved.get(key) != wanted.get(key)]
    for read in (
        lambda: restoring.restore(found, chunks),
        lambda: restoring.restore_params(found, model),
    ):
        with pytest.raises(CheckpointError) as error:
            read()
        told = [text for text in error.value.found.split(", ") if text.startswith(tuple(differ))]
        assert len(told) == 3, error.value.found
        for text in told:
            key = text.split(" is ")[0]
            assert text == (
                f"{key} is {saved.get(key, 'missing')} "
                f"(expected: {wanted.get(key, 'no such array')})"
            )


def found_arrays(found):
    """The arrays of a checkpoint on disk, as Orbax lists them."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        return {
            key: x
            for part in found.path.glob("part_*")
            for key, x in checkpointer.metadata(part).item_metadata.tree.items()
        }


def test_what_cannot_be_written_is_told_and_the_old_checkpoint_stays(tmp_path, capfd):
    write(tmp_path, steps=(5,))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with files_of_at_most(20_000), pytest.raises(PeerError, match="File too large"):
        write(tmp_path, steps=(6,))
    assert [checkpoint.step for checkpoint in manifest.find(tmp_path)] == [5]
    for path, content in before.items():
        assert path.read_bytes() == content
    assert capfd.readouterr() == ("", "")  # not what Orbax and asyncio have to say


@pytest.mark.parametrize("most_bytes", [20_000, 10])  # arrays are larger, or metadata as well
def test_a_save_that_failed_spoils_none_that_follows(tmp_path, most_bytes):
    """One cannot be begun, one fails on its way; each is told of, with its own step."""
    chunks = make_chunks(make_model(num_layers=2), hand_made_plan((1, 1), 1, 1))
    states, told = random_states(chunks), []
    note = lambda step, *rest: told.append((step, rest[0] if len(rest) == 1 else "saved"))
    (tmp_path / manifest.FOLDER).mkdir()
    (tmp_path / manifest.FOLDER / "step_00000001").touch()
    with writing.Writer(tmp_path, chunks, note, note) as writer:
        for step in (1, 2, 3, 4):
            with files_of_at_most(most_bytes) if step == 3 else contextlib.nullcontext():
                writer.save(step, states)
                writer.wait()
    assert [step for step, _ in told] == [1, 2, 3, 4]
    assert "File exists" in told[0][1]
    assert told[1][1] == told[3][1] == "saved"
    assert told[2][1] == "File too large"


def test_an_old_part_that_cannot_be_removed_fails_a_save_before_anybody_waits(
    tmp_path, monkeypatch
):
    """Orbax would find that out while the other processes of a stage wait in its collective."""
    chunks = make_chunks(make_model(num_layers=2), hand_made_plan((1, 1), 1, 1))
    states, told, saves = random_states(chunks), [], []
    (manifest.folder_of(tmp_path, 1) / "part_0" / "d").mkdir(parents=True)
    note = lambda step, *rest: told.append((step, *rest))

    def fails(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(shutil, "rmtree", fails)
    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", lambda *how, **options: saves.append(how))
    with writing.Writer(tmp_path, chunks, note, note) as writer:
        writer.save(1, states)
    assert saves == []
    [(step, why)] = told
    assert step == 1
    assert why.startswith("Device or resource busy")


def test_the_manifest_is_readable_and_complete(tmp_path):
    write(tmp_path)
    [found] = manifest.find(tmp_path)
    content = json.loads((found.path / manifest.MANIFEST).read_text())
    assert content["step"] == found.step == 10
    assert content["settings"]["model"]["width"] == 32
    assert content["sequences"] == 80
    on_disk = {p.relative_to(found.path).as_posix() for p in found.path.rglob("*") if p.is_file()}
    assert set(content["files"]) == on_disk - {manifest.MANIFEST}
