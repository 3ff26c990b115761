from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_service.bases.description import Described
from ft_service.cli.local import job_inputs
from ft_service.control.bases import describe_bases
from ft_service.host.running_servers import announced
from ft_service.installation import SAMPLE_SPEC
from ft_service.plan.machines import MACHINES
from ft_service.plan.plan_text import time_text
from ft_service.plan.seat import SEAT_SECONDS, START_SECONDS
from tests.support.bases import LLAMA_8B, save_base
from tests.support.command_line import Ft
from tests.support.describing import described_here
from tests.support.hub import Hub, hub_serving
from tests.support.run_directories import CHAT

ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.usefixtures("no_tokens")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_base(tmp_path / "models/llama-8b", LLAMA_8B)
    monkeypatch.setenv("FT_MODELS", str(tmp_path / "models"))
    (tmp_path / "train.jsonl").write_text(CHAT * 20)
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: llama-8b\ntraining_file: train.jsonl\nprecision: {default: nf4, overrides: "
        "{'.*down_proj': bf16}}\n"
        "training: {batch_size: 8, n_epochs: 2}\ndistributed: {nproc_per_node: 2}\n"
    )
    return path


def test_every_gpu_is_ranked_by_cost_and_the_rest_by_time(
    ft: Ft, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_time = ft("plan", spec, "--hardware", "all").out.splitlines()
    titles = next(line.split() for line in by_time if line.startswith("HARDWARE"))
    assert titles == ["HARDWARE", "FITS", "PER", "RANK", "TIME"]
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\nslot_hour: 1\nhardware: {L40S: 0.01, H100: 99}\n")
    monkeypatch.setenv("FT_PRICES", str(prices))
    ranked = json.loads(ft("plan", spec, "--hardware", "all", "--json").out)
    assert {one["hardware"] for one in ranked} == set(MACHINES)
    names = [one["hardware"] for one in ranked]
    assert names[:2] == ["L40S", "H100"]
    assert ranked[1]["cost"]["currency"] == "EUR"
    fitting = [one for one in ranked if one["fits"]]
    assert ranked[: len(fitting)] == fitting
    times = [one["time"]["seconds_likely"] for one in fitting[2:]]
    assert times == sorted(times)
    table = ft("plan", spec, "--hardware", "all").out
    assert "COST" in table
    for words in ((spec, "--memory", "24GiB"), (spec.parent / "models/llama-8b",)):
        ended = ft("plan", *words, "--hardware", "all")
        assert ended.code == 64, ended


def test_a_plan_says_what_it_costs_on_this_host_and_on_others(
    ft: Ft, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\nslot_hour: 1\nhardware: {H100: 99}\n")
    monkeypatch.setenv("FT_PRICES", str(prices))
    there = json.loads(ft("plan", spec, "--hardware", "h100", "--json").out)
    seconds = there["time"]["seconds_likely"]
    assert there["cost"]["likely"] == pytest.approx(2 * 99 * seconds / 3600, rel=1e-3)
    assert "EUR" in ft("plan", spec, "--hardware", "h100").out
    assert json.loads(ft("plan", spec, "--hardware", "a100", "--json").out)["cost"] is None
    here = json.loads(ft("plan", spec, "--json").out)
    assert here["cost"]["slot_hour"] == 1.0
    prices.rename(tmp_path / "gone")
    monkeypatch.setenv("FT_PRICES", str(tmp_path / "wrong.yaml"))
    (tmp_path / "wrong.yaml").write_text("currency: EUR\nhardwear: {}\n")
    ended = ft("plan", spec, "--hardware", "h100")
    assert (ended.code, "hardwear" in ended.err) == (64, True)


def test_a_plan_lists_modules_bytes_and_whether_it_fits(ft: Ft, spec: Path) -> None:
    brief = ft("plan", spec, "--hardware", "h100").out.splitlines()
    assert re.fullmatch(
        r"Fits H100: at most 4\d\.\d+ GiB of 74\.82 GiB usable per rank, likely \S+ GiB\.", brief[0]
    )
    assert brief[1].startswith("6 steps over 20 samples take ")
    assert "A checkpoint is written every 3 steps; checkpoint.save_steps changes that." in brief
    assert brief[-1].startswith("Chosen: ")
    assert len(brief) < 12, "the verdict and the data; the rest with --verbose"
    ended = ft("plan", spec, "--hardware", "h100", "--verbose")
    assert (ended.code, ended.err) == (0, "")
    lines = [line.split() for line in ended.out.splitlines()]
    assert [
        "model.layers.*.mlp.down_proj",
        "32",
        "4096",
        "x",
        "14336",
        "bf16",
        "3.50",
        "GiB",
        "3.50",
        "GiB",
    ] in lines
    assert [
        "model.layers.*.self_attn.q_proj",
        "32",
        "4096",
        "x",
        "4096",
        "nf4",
        "264.50",
        "MiB",
        "264.50",
        "MiB",
    ] in lines
    assert "distributed.replicate: -1 (the base fits whole on every rank, " in ended.out
    assert "\ntrain.jsonl: 20 samples of 7 tokens, " in ended.out


def test_the_readmes_example_needs_no_setting(ft: Ft) -> None:
    ended = ft("plan", ROOT / "deploy/examples/quickstart.yaml", "--hardware", "H100")
    assert ended.code == 0
    assert ended.err == ""
    assert "150 steps over " in ended.out


def test_the_sample_base_is_planned_without_the_workers_packages(
    ft: Ft, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed() -> None:
        raise LookupError("torch is not installed here")

    monkeypatch.setattr("ft_service.control.bases.describe_bases.Versions.installed", installed)
    assert "150 steps over " in ft("plan", SAMPLE_SPEC, "--hardware", "H100").out
    monkeypatch.setattr("ft_service.cli.local.job_inputs.SAMPLE_DESCRIPTIONS", ROOT)
    assert (
        "since torch is not installed here: pip install"
        in ft("plan", SAMPLE_SPEC, "--hardware", "H100").err
    )


def test_a_plan_needs_neither_weights_nor_tokenizer(ft: Ft, spec: Path) -> None:
    whole = json.loads(ft("plan", spec, "--hardware", "H100", "--json").out)
    for path in (spec.parent / "models/llama-8b").iterdir():
        if path.name != "config.json":
            path.unlink()
    alone = json.loads(ft("plan", spec, "--hardware", "H100", "--json").out)
    assert {m["name"]: m for m in alone["modules"]} == {m["name"]: m for m in whole["modules"]}
    assert alone["rank"] == whole["rank"]
    assert "The weights of the base are not here" in alone["warnings"][-1]
    assert "has no tokenizer" in ft("plan", spec, "--hardware", "H100").out
    (spec.parent / "models/llama-8b/pytorch_model.bin").write_bytes(b"pickled")
    assert (
        "only pytorch_model.bin, which is pickled and never read"
        in ft("plan", spec, "--hardware", "H100").out
    )
    assert "safetensors" in ft("run", spec).err


def test_offload_is_planned_for_a_machine_with_gpus_on_a_host_without(ft: Ft, spec: Path) -> None:
    sharded = (
        "--set",
        "distributed.nproc_per_node=2",
        "--set",
        "distributed.replicate=1",
        "--set",
        "distributed.offload=true",
    )
    plan = json.loads(ft("plan", spec, *sharded, "--hardware", "H100", "--json").out)
    assert plan["rank"]["offloaded"]
    assert "this host has no GPU" in ft("plan", spec, *sharded, "--hardware", "cpu").err


def test_beside_a_server_its_models_are_known(
    ft: Ft, spec: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FT_MODELS")
    home.mkdir()
    with announced(home, "http://127.0.0.1:9", [spec.parent / "models"]):
        assert ft("plan", spec, "--hardware", "H100").code == 0
    assert "there is no such base model" in ft("plan", spec, "--hardware", "H100").err


def test_as_json_every_module_is_listed(ft: Ft, spec: Path) -> None:
    plan = json.loads(ft("plan", spec, "--hardware", "H100", "--json").out)
    formats = {module["name"]: module["format"] for module in plan["modules"]}
    assert len(formats) == 32 * 9 + 3
    assert (formats["model.layers.31.mlp.down_proj"], formats["model.layers.0.mlp.up_proj"]) == (
        "bf16",
        "nf4",
    )
    rank = plan["rank"]
    terms = ["adapters", "gradients", "optimizer", "gather", "accumulation", "activations", "rows"]
    at_peak = max(rank["logits"], rank["workspace"])
    assert rank["total"] == sum(rank["base"].values()) + sum(rank[name] for name in terms) + at_peak
    assert 0 < plan["likely"]["rank"]["total"] <= plan["rank"]["total"]
    assert (plan["fits"], plan["time"]["steps"]) == (True, 6)
    assert (plan["data"].keys(), plan["data"]["training_file"]["samples"]) == (
        {"training_file"},
        20,
    )


def test_where_tokens_cannot_be_counted_lines_are(
    ft: Ft, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_service.cli.local.job_inputs.find_spec", lambda name: None)
    ended = ft("plan", spec, "--hardware", "H100")
    assert "6 steps over 20 samples" in ended.out
    assert (
        "Tokens are not counted here: transformers is not installed, or the base has no "
        "tokenizer.\n" in ended.out
    )
    (spec.parent / "train.jsonl").write_text(CHAT + "{}\n")
    refused = ft("plan", spec, "--hardware", "H100")
    assert (refused.code, "line 2: messages is required" in refused.err) == (64, True)


def test_a_large_file_keeps_nobody_in_the_dark(ft: Ft, spec: Path) -> None:
    (spec.parent / "train.jsonl").rename(spec.parent / "large.jsonl")
    spec.write_text(spec.read_text().replace("train.jsonl", "large.jsonl"))
    ended = ft("plan", spec, "--hardware", "h100", "--json")
    assert ended.err == "Validating training file: 7 lines (50 %).\n"
    assert json.loads(ended.out)["fits"]


def test_what_does_not_fit_is_told_with_what_would(ft: Ft, spec: Path) -> None:
    ended = ft("plan", spec, "--hardware", "RTX-4090", "--memory", "3GiB")
    assert ended.out.startswith("May not fit RTX-4090: ")
    assert "with training.max_length: 1024: " in ended.out
    assert "with precision.default: nf4, precision.overrides: {}: " in ended.out
    assert ended.code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hardware", "B17"), "--hardware = 'B17': not known. There are B300, B200, GH200"),
        (("--memory", "much"), "--memory = 'much': expected a size such as 24GiB"),
        (("--memory", "9" * 400), f"--memory = '{'9' * 80}': at most 1024TiB."),
    ],
)
def test_usage_that_is_wrong_is_one_line(
    ft: Ft, spec: Path, options: tuple[str, ...], message: str
) -> None:
    ended = ft("plan", spec, *options)
    assert ended.code == 64
    assert ended.err.startswith(f"ft: {message}")


def test_a_base_that_is_described_for_long_is_told(
    ft: Ft, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()

    def described_slowly(folder: Path, stop: Callable[[], bool]) -> Described:
        assert told.wait(60)
        return described_here(folder, stop)

    monkeypatch.setattr(describe_bases, "describe_in_process", described_slowly)
    monkeypatch.setattr(job_inputs, "SILENT_SECONDS", 0.0)
    timer = threading.Timer

    def telling(seconds: float, notify: Callable[[str], None], given: list[str]) -> threading.Timer:
        return timer(seconds, lambda: (notify(*given), told.set()))

    monkeypatch.setattr(job_inputs.threading, "Timer", telling)
    assert ft("plan", spec).err == "Describing the base, which is done once …\n"


def test_planning_imports_neither_torch_nor_a_web_framework(
    ft: Ft, spec: Path, tmp_path: Path
) -> None:
    ft("plan", spec)  # the base is described, in this process
    code = (
        "import sys; from ft_service.cli.root_command import run; code = run(['plan', "
        "sys.argv[1]]); "
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors', 'fastapi', 'sqlalchemy'}; "
        "print(sorted(heavy & set(sys.modules))); sys.exit(code)"
    )
    environment = {**os.environ, "FT_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", code, str(spec)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")
    *lines, loaded = ended.stdout.splitlines()
    assert loaded == "[]"
    assert any(re.match(r"train\.jsonl: 20 samples of \d+ tokens, ", line) for line in lines), (
        "counted in a process of its own"
    )


def test_a_sweep_is_planned_as_a_whole(ft: Ft, spec: Path) -> None:
    tried = (
        "validation_split: 0.2\nsweep: {lora.r: [8, 64], training.learning_rate: [1e-4, 1e-3, "
        "1e-2]}\n"
    )
    spec.write_text(spec.read_text() + tried)
    head, time, together, early, *rest = ft("plan", spec, "--hardware", "h100").out.splitlines()
    assert head.startswith("6 jobs, of which the largest fits H100: at most ")
    assert (
        time.startswith("One after the other, their 24 steps over 16 samples take ")
        or "steps over" in time
    )
    assert "; in one engine, all at once on one base, about " in together
    assert "stopped early" in early
    titles, *rows = [line.split("\t") for line in rest if "\t" in line]
    assert titles == ["lora.r", "training.learning_rate", "STEPS", "PER RANK", "FITS"]
    assert [row[:2] for row in rows] == [
        [r, rate] for r in ("8", "64") for rate in ("0.0001", "0.001", "0.01")
    ]
    plan = json.loads(ft("plan", spec, "--hardware", "h100", "--json").out)
    assert len(plan["jobs"]) == 6
    assert plan["time"]["steps"] == sum(job["time"]["steps"] for job in plan["jobs"])
    assert plan["jobs"][3]["bytes_per_rank"] > plan["jobs"][0]["bytes_per_rank"]
    assert "did you mean lora.r?" in ft("plan", spec, "--set", "sweep.lora.rr=[1, 2]").err


def test_a_sweep_whose_jobs_share_an_engine_is_told_its_time_there(
    ft: Ft, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec.write_text(
        spec.read_text()
        + "validation_split: 0.2\nsweep: {training.learning_rate: [1e-4, 1e-3, 1e-2]}\n"
    )
    args = ("plan", spec, "--hardware", "cpu", "--memory", "1TiB")
    _, alone, together, *_ = ft(*args).out.splitlines()
    assert alone.startswith("One after the other, their ")
    assert re.fullmatch(
        r"With the starts of their ranks about .*; in one engine, all at once on one base, about "
        r".*",
        together,
    )
    time = json.loads(ft(*args, "--json").out)["time"]
    start = START_SECONDS + 3 * SEAT_SECONDS
    assert start < time["seconds_in_engine"] < start + time["seconds_likely"]

    assert (
        json.loads(ft(*args, "--set", "engine=off", "--json").out)["time"]["seconds_in_engine"]
        is None
    )
    monkeypatch.setenv("FT_ENGINE_JOBS", "0")
    assert json.loads(ft(*args, "--json").out)["time"]["seconds_in_engine"] is None


def test_options_of_the_command_line_go_before_those_of_the_spec(ft: Ft, spec: Path) -> None:
    plan = json.loads(
        ft("plan", spec, "--hardware", "H100", "--json", "--set", "training.n_epochs=1").out
    )
    assert plan["time"]["steps"] == 3
    assert "--set 'lora'" in ft("plan", spec, "--set", "lora").err
    assert "--set lora.r: '[1' is not a YAML value" in ft("plan", spec, "--set", "lora.r=[1").err
    assert (
        "lora.rank: there is no such option; did you mean lora.r?"
        in ft("plan", spec, "--set", "lora.rank=1").err
    )
    assert "--set seed is given twice" in ft("plan", spec, "--set", "seed=1", "--set", "seed=2").err
    assert (
        "--model and --set model are both given"
        in ft("plan", spec, "--model", "a", "--set", "model=b").err
    )
    assert (
        "training.n_epochs.x: training.n_epochs is 2 here"
        in ft("plan", spec, "--set", "training.n_epochs.x=1").err
    )
    bare = ft("plan", spec.with_name("train.jsonl"), "--model", "llama-8b", "--hardware", "H100")
    assert bare.out.startswith("Fits H100: ")


def test_a_time_is_never_about_nothing(ft: Ft, spec: Path) -> None:
    assert time_text(
        {"steps": 3, "examples": 6, "seconds_at_most": 0.4, "seconds_likely": 0.2}
    ) == ("3 steps over 6 samples take less than a second.")
    assert time_text(
        {"steps": 3, "examples": 6, "seconds_at_most": 9.0, "seconds_likely": 7.7}
    ) == (
        "3 steps over 6 samples take about 8 s (at worst 9 s, if all were as long as the longest)."
    )


def test_more_ranks_than_this_host_has_do_not_fit(
    ft: Ft, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_SLOTS", "2")
    assert ft("plan", spec).code == 0
    many = spec.read_text().replace("nproc_per_node: 2", "nproc_per_node: 64")
    spec.write_text(many)
    refused = ft("plan", spec)
    assert refused.code == 64
    assert refused.err.startswith(
        "ft: distributed.nproc_per_node = 64: this host runs at most 2 ranks at once."
    )
    assert ft("plan", spec, "--hardware", "h100").code == 0, "such hosts may have any number"


@pytest.fixture
def hub(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    save_base(tmp_path / "published")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    with hub_serving(tmp_path / "published") as serving:
        monkeypatch.setenv("HF_ENDPOINT", serving.url)
        yield serving


def test_a_base_that_is_not_here_is_planned_by_what_the_hub_says_of_it(
    ft: Ft, spec: Path, hub: Hub
) -> None:
    save_base(spec.parent / "models/org/here")
    here = ft("plan", "org/here", "--hardware", "H100")
    assert (here.code, here.err) == (0, "")
    assert here.out.splitlines()[-2] == (
        "With data it also says how long that takes: ft plan DATA -m org/here"
    )
    ended = ft("plan", "org/tiny", "--hardware", "H100")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[0] == here.out.splitlines()[0]
    told = ended.out.splitlines()[-2]
    assert told.startswith("The weights of org/tiny are not here yet: ")
    assert told.endswith("(licence: apache-2.0): ft pull org/tiny")
    assert "config.json" in {name for name, _ in hub.asked}
    assert "model.safetensors" not in {name for name, _ in hub.asked}
    data = ("plan", spec.with_name("train.jsonl"), "--hardware", "H100", "--json", "-m")
    plan, same = (json.loads(ft(*data, name).out) for name in ("org/tiny", "org/here"))
    assert plan.pop("not_here") == told
    assert [plan.pop("warnings"), same.pop("warnings")] == [
        [
            "The weights of the base are not here, or not all of them: their shapes are taken from its config.json."
        ],
        [],
    ]
    assert plan == same
    assert plan["time"]["steps"] > 0
    alone = json.loads(ft("plan", "org/tiny", "--hardware", "H100", "--json").out)
    assert (alone["time"], alone["not_here"]) == (None, told)
    assert not (spec.parent / "models/org/tiny").exists()
    assert not (spec.parent / "models/.pulls").exists()


def test_what_neither_this_host_nor_the_hub_has_is_refused_with_a_way_out(
    ft: Ft, spec: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_base(spec.parent / "models/org/here")
    wrong = ft("plan", "org/heer")
    assert wrong.code == 64
    assert "there is no such base model. Did you mean org/here?" in wrong.err
    assert "There is no model org/heer at " in wrong.err
    assert "there is no such base model. Did you mean llama-8b?" in ft("plan", "lama-8b").err
    assert ft("plan", "jobs/none.yaml").err.endswith("No such file or directory.\n")
    hub.token = "hf_x"
    assert "org/tiny is gated: accept its terms" in ft("plan", "org/tiny").err
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    away = ft("plan", "org/tiny")
    assert away.code == 64
    assert "To fetch it, on the server's host: ft pull org/tiny." in away.err
    assert "cannot be reached" in away.err
    assert "can be planned without a hub: --model DIR" in away.err
