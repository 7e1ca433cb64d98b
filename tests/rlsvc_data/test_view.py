import re

import numpy as np
import pytest
from recorded import FRONT, open_recorder, record, stamps_of, step_of
from typer.testing import CliRunner

from rlsvc.cli import app
from rlsvc.core.errors import DatasetError
from rlsvc.data.video import count_frames
from rlsvc.data.view import HEIGHT, WIDTH, plot, write_view


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "recorded"
    with open_recorder(path, camera=True) as recorder:
        record(recorder, 0, 6, camera=True)
        for i in range(3):
            step = step_of(1, i, camera=True)
            recorder.add(step, stamps_of(step, i / 8))
        recorder.end_episode("cut", "<b>lift & hold</b>")
    return path


def test_the_page_shows_every_episode_with_its_own_video_and_needs_no_network(recorded, tmp_path):
    result = CliRunner().invoke(app, ["dataset", "view", str(recorded), str(tmp_path / "page")])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page/index.html").read_text()
    assert page.count("<section") == 2
    assert [count_frames(tmp_path / "page" / name) for name in re.findall(r'video src="([^"]+)"', page)] == [6, 3]
    assert "&lt;b&gt;lift &amp; hold&lt;/b&gt;" in page
    assert "<b>lift" not in page
    assert "//" not in re.sub(r'(src|href)="videos/[^"]*"', "", page)  # no address of any kind
    first, second = page.split("<section")[1:]
    assert "<span>success</span>" in first
    assert "<span>cut</span>" in second
    assert "a person acted in 50 % of steps" in first
    assert "actors: policy-3, anna" in first
    for key in ("observation.state (rad)", "action (rad)", "reward"):
        assert f"<b>{key}</b>" in first
    assert first.count('class="person"') == 3 * 3  # three stretches in three plots


def test_a_plot_has_each_value_at_its_place():
    column = np.array([[0.0, 10.0], [5.0, 10.0], [10.0, 10.0], [0.0, 10.0]])
    svg = plot("state", column, ("pan", "lift"), "deg", np.array([False, True, True, False]))
    low, high = HEIGHT - 6, 6
    quarter = WIDTH / 4
    assert f'points="0.0,{low:.1f} {quarter:.1f},{(low + high) / 2:.1f} {2 * quarter:.1f},{high:.1f} ' in svg
    assert f'<rect class="person" x="{quarter:.1f}" y="0" width="{2 * quarter:.1f}"' in svg
    assert "pan</span>" in svg
    assert "0 to 10" in svg
    assert "stroke-dasharray" not in svg
    asked = plot("action", column, (), "", np.zeros(4, bool), column * [1, 2])
    assert asked.count("stroke-dasharray") == 1  # only the dimension that the guard changed


def test_a_page_is_replaced_only_when_asked_and_nothing_else_ever(recorded, tmp_path):
    write_view(recorded, tmp_path / "page", [1])
    with pytest.raises(DatasetError, match=r"a page is already there; .* --overwrite"):
        write_view(recorded, tmp_path / "page", [0])
    write_view(recorded, tmp_path / "page", [0], overwrite=True)
    assert [p.name for p in (tmp_path / "page/videos").iterdir()] == [f"000000_{FRONT.rpartition('.')[2]}.mp4"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/index.html").write_text("<p>mine</p>")
    with pytest.raises(DatasetError, match="is not such a page, so it is not overwritten"):
        write_view(recorded, tmp_path / "mine", overwrite=True)
    with pytest.raises(DatasetError, match="no episode 7; it has 2 episodes"):
        write_view(recorded, tmp_path / "other", [7])
