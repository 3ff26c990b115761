from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_service.errors import SpecError
from ft_service.launcher.slurm.slurm_profile import load_slurm_profiles


def written(folder: Path, **values: Any) -> Path:
    path = folder / "slurm-profile.yaml"
    path.write_text(yaml.safe_dump({"ranks_per_node": 8, **values}))
    return path


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"colour": "red"}, "colour: there is no such option"),
        ({"ranks_per_node": 0}, "ranks_per_node = 0"),
        ({"partition": "gpu; rm -rf /"}, "partition"),
        ({"account": "$(id)"}, "account"),
        ({"gres": "gpu --wrap=x"}, "gres"),
        ({"time": "soon"}, "it is not a time limit of sbatch"),
        ({"memory_per_node": "much"}, "memory_per_node"),
        ({"memory_per_node": "8G", "memory_per_rank": "1G"}, "memory_per_rank"),
        ({"options": ["reservation=x"]}, "is not written as --name or --name=value"),
        ({"options": ["--reservation x"]}, "is not written as --name or --name=value"),
        ({"options": ["--requeue"]}, "--requeue is the service's; leave it out"),
        ({"options": ["--time=5"]}, "--time is a key of the profile"),
        ({"options": ["--array=1-9"]}, "--array is not for such jobs"),
        ({"env": {"A B": "x"}}, "env"),
        ({"python": "python"}, "python"),
    ],
)
def test_a_profile_that_is_wrong_is_named_with_its_field(
    tmp_path: Path, values: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError) as refused:
        load_slurm_profiles(written(tmp_path, **values))
    assert says in refused.value.message
    assert refused.value.message.startswith(f"FT_SLURM_PROFILE = {tmp_path}")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("4:00:00", 14400),
        ("1-12", 129_600),
        ("1-00:30", 88_200),
        ("2-01:01:01", 176_461),
        (None, None),
        ("0", None),
        ("0-00", None),
    ],
)
def test_time_is_read_as_sbatch_reads_it(
    tmp_path: Path, time: str | None, seconds: int | None
) -> None:
    assert load_slurm_profiles(written(tmp_path, time=time)).first.time_seconds == seconds


@pytest.mark.parametrize(
    ("line", "seconds"), [("time: 4:00:00", 14400), ("time: 90", 5400), ("time: 90:30", 5430)]
)
def test_time_needs_no_quotes(tmp_path: Path, line: str, seconds: int) -> None:
    path = tmp_path / "slurm-profile.yaml"
    path.write_text(f"ranks_per_node: 8\n{line}\n")
    assert load_slurm_profiles(path).first.time_seconds == seconds


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"FT_SLURM_PROFILE = .*none\.yaml"):
        load_slurm_profiles(tmp_path / "none.yaml")


def test_a_project_gets_the_account_that_is_its_own(tmp_path: Path) -> None:
    several = tmp_path / "several.yaml"
    several.write_text(
        "{ranks_per_node: 8, partition: gpu, profiles: {"
        "vision: {projects: [proj_1], account: vision}, "
        "others: {account: shared, partition: a100, gres: 'gpu:a100'}}}"
    )
    profiles = load_slurm_profiles(several)
    mine, theirs = (profiles.by_name[profiles.choose(None, of)] for of in ("proj_1", "proj_2"))
    assert (mine.account, mine.partition, mine.gres) == ("vision", "gpu", "gpu")
    assert (theirs.account, theirs.partition, theirs.gres) == ("shared", "a100", "gpu:a100")
    with pytest.raises(SpecError, match="Choose from others") as refused:
        profiles.choose("vision", "proj_2")
    assert refused.value.param == "distributed.profile"
    with pytest.raises(SpecError, match=r"profiles\.vision.*acount"):
        load_slurm_profiles(written(tmp_path, profiles={"vision": {"acount": "a"}}))
