"""Whatever is damaged: either the data loads or one DatasetError says why; nothing else ever comes out."""

import random
from pathlib import Path

import pytest

from rlsvc.core.errors import DatasetError
from rlsvc.data.check import check_path
from rlsvc.data.load import load_table
from rlsvc.spec.data import DatasetSpec

SAMPLES = ("cr5_v21", "g1_v30", "bridge_rlds", "pusht/pusht_first3.npz", "pusht/pusht_first1.zarr")


def damage(file: Path, rng: random.Random) -> None:
    """Cut a file short, change some of its bytes, blank a part, or push a few bytes in."""
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            del data[at:]
        case 1:
            for _ in range(rng.choice([1, 5, 50])):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 2:
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        case _:
            data[at:at] = rng.randbytes(9)
    file.write_bytes(data)


@pytest.mark.filterwarnings("ignore:Object at:UserWarning")
@pytest.mark.parametrize("name", SAMPLES)
def test_damage_anywhere_gives_data_or_a_dataset_error(name, sample):
    path = sample(name)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and p.name != "LICENSE")
    rng = random.Random(f"damage to {name}")
    refused = 0
    for _ in range(25):
        file = rng.choice([file for file in files if file.stat().st_size])
        whole = file.read_bytes()
        damage(file, rng)
        try:
            reports = check_path(path)
            load_table(DatasetSpec.model_validate({"path": str(path)}), ["observation.state", "action"])
        except DatasetError:
            refused += 1
        else:
            assert reports
        file.write_bytes(whole)
    assert refused, "no damage was severe enough for this test to mean something"
