"""Tokens/s, MFU and the time to the end, of plans and of runs."""

import io
import json

import numpy as np
import pytest

from holmesjax import config as configs, job as jobs, job_description
from holmesjax.config import CHECKOUT
from holmesjax.errors import ConfigError
from holmesjax.report import metrics, recorder
from tests.jobs import write_run
from tests.report.process_steps import process_step

H100_BFLOAT16 = 989e12  # FLOP/s, dense, of NVIDIA's data sheet for the SXM module
GPT = ["model.num_layers=4", "model.width=256", "model.vocab_size=512", "train.global_batch=8"]


def load(folder, *settings, kind="cpu", nodes=(2,)):
    path = write_run(folder, {"a": nodes})
    topology = folder / "run_topology.yaml"
    topology.write_text(topology.read_text().replace("kind: cpu", f"kind: {kind}"))
    return jobs.load(path, settings)


def test_mfu_of_a_plan_is_the_flop_of_its_products_over_those_of_the_data_sheet(tmp_path):
    job = load(tmp_path, "train.compute_dtype=bfloat16", *GPT, kind="h100", nodes=(2, 2))
    tokens, width, length, vocab = 8 * 32, 256, 32, 512
    weights = {"qkv": 3 * width**2, "out": width**2, "mlp": 8 * width**2}
    forward = 4 * (2 * tokens * sum(weights.values()) + 2 * 2 * tokens * length * width)
    flop = 3 * (forward + 2 * tokens * width * vocab)
    num_devices = sum(len(stage.devices) for stage in job.plan.stages)
    assert job.peak_step_s == pytest.approx(flop / (num_devices * H100_BFLOAT16), rel=2e-3)
    [line] = [line for line in job_description.describe(job) if line.startswith("rate ")]
    assert f"{tokens / job.plan.step_time_s:,.0f} tokens/s" in line
    counted = " (attention counted whole, not half as its causal mask) predicted; 10 steps in "
    assert f"MFU {job.peak_step_s / job.plan.step_time_s:.1%}{counted}" in line


def test_a_rehearsal_has_a_predicted_mfu_and_none_that_is_measured(tmp_path):
    job = load(tmp_path, "train.compute_dtype=bfloat16", "run.rehearse=true", kind="h100")
    assert job.measured_peak_step_s is None
    assert [
        line for line in job_description.describe(job) if "MFU" in line and "are rehearsed" in line
    ]
    cpu = load(tmp_path)  # whose peak is a guess
    assert cpu.peak_step_s is None
    assert "MFU" not in "".join(job_description.describe(cpu))


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_the_plan_says_in_which_numbers_it_sums(tmp_path, moments):
    job = load(tmp_path, f"optimizer.moments={moments}", "train.compute_dtype=bfloat16")
    line = f"products in bfloat16, gradients summed in float32, moments in {moments}"
    assert f"numbers     {line}" in job_description.describe(job)


@pytest.mark.parametrize(
    "kind, nodes, settings, words",
    [
        ("h100", (2,), ["parallel.data=2"], "sent between replicas in bfloat16"),
        ("cpu", (2,), ["parallel.data=2"], "rounded to bfloat16 and sent between replicas in f"),
        ("h100", (3,), ["parallel.data=3", "train.global_batch=12"], "in float32 (`data` does not"),
        ("h100", (1,), [], "none sent between replicas"),
    ],
)
def test_the_header_says_how_gradients_are_sent(tmp_path, kind, nodes, settings, words):
    narrow = ["train.compute_dtype=bfloat16", "train.reduction_dtype=bfloat16"]
    job = load(tmp_path, *GPT, *narrow, *settings, kind=kind, nodes=nodes)
    [line] = [line for line in job_description.describe(job) if line.startswith("numbers ")]
    assert words in line


def test_the_header_says_when_a_warmup_by_tokens_ends(tmp_path):
    settings = ["optimizer.schedule_by=tokens", "optimizer.warmup_steps=0"]
    settings += ["optimizer.warmup_tokens=600", "train.rampup=[{steps: 3, global_batch: 4}]"]
    line = "schedule    cosine by tokens: warm-up 600 (4 steps), 2,176 in all"  # 3 * 128 + 256
    assert line in job_description.describe(load(tmp_path, *settings))


def test_what_is_measured_stands_on_the_console_in_the_summary_and_in_the_file(
    tmp_path, monkeypatch
):
    """Steps of 2, 1, 1 and 3 s; 4 s of validation lie between the second and the third."""
    now_s = 100.0
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now_s)
    config = load(tmp_path, "train.steps=9").config
    past, out = {"step": 1, "tokens_per_s": 1e9, "step_time_s": 1e-9}, io.StringIO()
    (tmp_path / metrics.FILE).write_text(json.dumps(past) + "\n")
    with recorder.Recorder(
        tmp_path, config, done_steps=1, peak_step_s=0.5, stream=out
    ) as recording:
        assert recording.summary() == []
        for step, (step_s, passed_s) in enumerate([(2, 2), (1, 1), (1, 5), (3, 3)], start=2):
            now_s += passed_s
            recording.take(process_step(step, float(step_s)))
        summary, spent = recording.summary()
        assert recording.write_report(60.0) is None  # a test's run wants none
    first, *records = metrics.read(tmp_path)
    assert first == past
    page = (CHECKOUT / "docs/run_folder.md").read_text()
    missing = {key for record in records for key in record if f"`{key}`" not in page}
    assert not missing
    tokens = config.train.global_batch * config.model.context_length
    np.testing.assert_allclose(
        [r["tokens_per_s"] for r in records], tokens / np.array([2, 1, 1, 3])
    )
    np.testing.assert_allclose([r["mfu"] for r in records], 0.5 / np.array([2, 1, 1, 3]))
    left = [record.get("time_left_s") for record in records]
    assert left == [None, 6 * 1 / 1, 5 * (1 + 5) / 2, 4 * (1 + 5 + 3) / 3]
    assert out.getvalue().splitlines()[-1].endswith("left 12.0 s")
    assert summary == (
        f"trained     4 steps in 11.0 s: {tokens / 1.5:,.0f} tokens/s, MFU {0.5 / 1.5:.1%}, "
        "1.5 s/step (median)"
    )
    assert (
        spent == "goodput     92.0% of the run's time to its last step: step 10.1 s, input 875 ms"
    )


def test_a_step_ends_with_its_slowest_process(tmp_path):
    """Two processes tell of two steps, out of order; each is written when both have told."""
    config = load(tmp_path).config
    out = io.StringIO()
    with recorder.Recorder(
        tmp_path, config, done_steps=0, num_processes=2, stream=out
    ) as recording:
        for step, step_s, number in [(1, 3.0, 1), (2, 1.0, 1), (1, 2.0, 2), (2, 4.0, 2)]:
            risen = {"memory_bytes": {f"device {number}": 100 * step}} if step_s == 3.0 else {}
            recording.take(
                {**process_step(step, step_s), **risen, "link_bytes": {"a -> b": number}}
            )
    records = metrics.read(tmp_path)
    assert [record["step_time_s"] for record in records] == [3.0, 4.0]
    assert [record.get("memory_bytes") for record in records] == [{"device 1": 100}, None]
    assert [record["input_wait_s"] for record in records] == [3 / 8, 4 / 8]
    assert [record["link_bytes"] for record in records] == [{"a -> b": 3}] * 2


def test_overrides_may_be_a_dict(tmp_path):
    path = write_run(tmp_path, {"a": (1,), "b": (1,)})
    flat = {
        "train.steps": 7,
        "optimizer.clip_norm": None,
        "run.dir": "007",
        "parallel.layers": (1, 3),
    }
    nested = {"train": {"steps": np.int64(7)}, "optimizer": {"clip_norm": None}}
    nested |= {"run": {"dir": tmp_path / "007"}, "parallel.layers": [1, 3]}
    want = configs.load(
        path,
        ["train.steps=7", "optimizer.clip_norm=null", "run.dir='007'", "parallel.layers=[1,3]"],
    )
    assert jobs.load(path, flat).config == want
    assert jobs.load(path, nested).config.parallel == want.parallel
    assert jobs.load(path, nested).config.run.dir == str(tmp_path / "007")
    assert jobs.load(path, "train.steps=7").config.train.steps == 7


@pytest.mark.parametrize("name", ["loss", "val_loss", "time_left_s"])
def test_a_number_of_ones_own_takes_no_name_of_a_record(tmp_path, name):
    config = load(tmp_path, "train.steps=9").config
    with recorder.Recorder(tmp_path, config, done_steps=0, stream=io.StringIO()) as recording:
        recording.take({**process_step(1, 1.0), "own": {f"own/{name}": 2.0}})
        with pytest.raises(ConfigError, match=f"a callback's number '{name}'"):
            recording.take({**process_step(2, 1.0), "own": {name: 2.0}})
    [record] = metrics.read(tmp_path)
    assert record[f"own/{name}"] == 2.0
