"""Media items: what a user may pass, and the files that they become."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import refuses
from PIL import Image

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.metrics.image_files import pictures, png, png_size
from phalanx.framework.metrics.media import Histogram, Images, Table, Text


def decoded(picture: Any) -> np.ndarray[Any, Any]:
    content = picture if isinstance(picture, bytes) else png(picture)
    return np.asarray(Image.open(io.BytesIO(content)))


@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5), (2, 4, 5), (3, 4, 5), (4, 4, 5)])
def test_a_tensor_becomes_the_png_that_pillow_reads(shape: tuple[int, ...]) -> None:
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    expected = (image.permute(1, 2, 0) if len(shape) == 3 else image).numpy()
    (picture,) = pictures(image)
    assert np.array_equal(decoded(picture), expected.squeeze())
    assert png_size(png(picture)) == (5, 4)


def test_kinds_of_images_and_values(tmp_path: Path) -> None:
    row = torch.tensor([[0.0, 0.5, 1.0, 7.0, float("nan")]])
    assert decoded(pictures(row)[0]).tolist() == [[0, 128, 255, 255, 0]]
    assert decoded(pictures(row > 0.6)[0]).tolist() == [[0, 0, 255, 255, 0]]
    array = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert np.array_equal(decoded(pictures(array)[0]), array)
    Image.fromarray(array).save(tmp_path / "a.png")
    for given in (Image.fromarray(array), tmp_path / "a.png", str(tmp_path / "a.png")):
        assert np.array_equal(decoded(pictures(given)[0]), array)
    assert len(pictures(torch.zeros(3, 1, 2, 2))) == len(pictures([array, row, row])) == 3


def test_an_image_is_a_copy() -> None:
    image = torch.zeros(2, 2, dtype=torch.uint8)
    (picture,) = pictures(image)
    image.fill_(9)
    assert picture.sum() == 0


@pytest.mark.parametrize("image", [torch.zeros(5, 2, 2), torch.zeros(2), torch.zeros(0, 2), 3, np.zeros((3, 2, 5))])
def test_other_objects_than_images_are_refused(image: Any) -> None:
    with refuses(ConfigurationError, "image"):
        pictures(image)


def test_files_have_the_name_the_step_and_a_number(tmp_path: Path) -> None:
    picture = np.zeros((1, 1), np.uint8)
    paths = Images("val/a b", 7, [picture, picture], []).write(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in paths] == ["val/a_b_7_0.png", "val/a_b_7_1.png"]
    (path,) = Text("../../x", 7, "é").write(tmp_path)
    assert path == tmp_path / "_" / "_" / "x_7.txt"
    assert path.read_text() == "é"


def test_tables_and_histograms_as_files(tmp_path: Path) -> None:
    (path,) = Table("t", 0, ["x", "y"], [[1, "a,b"], [None, 2.5]]).write(tmp_path)
    assert list(csv.reader(path.open(newline=""))) == [["x", "y"], ["1", "a,b"], ["", "2.5"]]
    (path,) = Histogram("h", 0, [1, 2], [0.0, 0.5, 1.0], 2.0, 2.0).write(tmp_path)
    assert json.loads(path.read_text()) == {"counts": [1, 2], "edges": [0.0, 0.5, 1.0]}
